"""Weights: loaded strictly, or not at all, and from safetensors only."""

from __future__ import annotations

import json
import pickle
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fathoms
from fathoms import FathomsError, ViT, ViTConfig, load_weights
from fathoms.errors import ShapeError
from fathoms.models import model_sources
from fathoms.models.weight_names import resize_positions, to_timm

TINY = {"image_size": 32, "patch_size": 8, "dim": 32, "heads": 2, "depth": 2, "num_classes": 5}
CAIT = {"attention": "talking_heads", "residual": "layerscale", "readout": "class_attention"}


def built(**options):
    torch.manual_seed(0)
    return ViT(ViTConfig(**TINY | options)).eval()


def images(size=32):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def other(model):
    """The same architecture with other weights."""
    torch.manual_seed(99)
    twin = ViT(model.config).eval()
    assert not torch.equal(twin(images()), model(images()))
    return twin


@pytest.mark.parametrize("options", [{}, CAIT, {"residual": "rezero_shared"}, {"registers": 4}], ids=str)
@pytest.mark.parametrize("layout", ["fathoms", "timm"])
def test_saved_weights_come_back(options, layout, tmp_path):
    model = built(**options)
    path = tmp_path / "model.safetensors"
    if layout == "timm" and options.get("residual") == "rezero_shared":
        with pytest.raises(FathomsError, match="residual='rezero_shared' has no place in timm's layout"):
            fathoms.save_weights(model, path, layout=layout)
        assert not list(tmp_path.iterdir())
        return
    fathoms.save_weights(model, path, layout=layout)
    twin = other(model)
    report = fathoms.load_weights(twin, path)
    assert (report.layout, report.resized, report.skipped) == (layout, None, ())
    assert torch.equal(twin(images()), model(images()))


@pytest.mark.parametrize("wrap", ["plain", "module.", "_orig_mod.", "_orig_mod.module.", "model", "deit"])
def test_wrapped_checkpoints_are_recognised(wrap):
    model = built(**CAIT)
    state = to_timm(dict(model.named_parameters()), model.config)
    if wrap == "model":
        state = {"model": state}
    elif wrap == "deit":
        state = {"model": {f"module.{name}": value for name, value in state.items()}}
    elif wrap != "plain":
        state = {wrap + name: value for name, value in state.items()}
    twin = other(model)
    fathoms.load_weights(twin, state)
    assert torch.allclose(twin(images()), model(images()), atol=1e-6)


def test_scaler_checkpoints_with_the_compilers_prefix_load():
    model = built(norm="learnable_scaler")
    state = to_timm(dict(model.named_parameters()), model.config)
    assert {"blocks.0.norm1.a", "blocks.0.norm1.b", "norm.a"} <= state.keys()
    twin = other(model)
    fathoms.load_weights(twin, {f"_orig_mod.{name}": value for name, value in state.items()})
    assert torch.equal(twin(images()), model(images()))


def test_positions_are_resized_when_the_image_size_differs(tmp_path):
    model = built()
    fathoms.save_weights(model, tmp_path / "model.safetensors")
    larger = built(image_size=64)
    report = fathoms.load_weights(larger, tmp_path / "model.safetensors")
    assert report.resized == (4, 8)
    assert torch.equal(larger.position.table, resize_positions(model.position.table, 8))
    assert larger(images(64)).isfinite().all()


def test_a_class_token_and_its_position_are_two_parameters_or_their_sum():
    apart, summed = (
        fathoms.create_model("vit_digits", depth=1, class_position=placed) for placed in (None, False)
    )
    assert len(list(apart.parameters())) == len(list(summed.parameters())) + 1
    fathoms.load_weights(summed, apart.state_dict())
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(summed(images), apart(images))
    other = fathoms.create_model("vit_digits", depth=1)
    fathoms.load_weights(other, summed.state_dict())
    assert not other.readout.positions.any()
    assert torch.equal(other(images), apart(images))


def test_resizing_keeps_a_constant_and_the_same_grid():
    assert torch.allclose(resize_positions(torch.full((16, 3), 2.5), 7), torch.full((49, 3), 2.5))
    table = torch.randn(16, 3)
    assert torch.allclose(resize_positions(table, 4), table, atol=1e-6)


def test_positions_are_resized_without_antialiasing_on_request():
    """DeiT's own code has none: the difference shows where the grid shrinks."""
    model, large = built(), built(image_size=64)
    fathoms.load_weights(model, dict(large.named_parameters()), antialias=False)
    maps = large.position.table.detach().T.unflatten(1, (large.grid, large.grid))[None]
    plain = torch.nn.functional.interpolate(maps, size=(model.grid,) * 2, mode="bicubic")[0].flatten(1).T
    assert torch.allclose(model.position.table, plain, atol=1e-6)
    fathoms.load_weights(model, dict(large.named_parameters()))
    assert not torch.allclose(model.position.table, plain, atol=1e-3)


def test_missing_extra_and_misshaped_tensors_are_all_listed_and_nothing_changes():
    model = built()
    state = {name: value.detach().clone() for name, value in model.named_parameters()}
    del state["blocks.1.mlp.fc2.bias"]
    state["fc_norm.weight"] = torch.ones(32)
    state["norm.weight"] = torch.ones(33)
    twin = other(model)
    before = {name: value.clone() for name, value in twin.named_parameters()}
    with pytest.raises(FathomsError) as caught:
        fathoms.load_weights(twin, state)
    message = str(caught.value)
    assert "missing: blocks.1.mlp.fc2.bias" in message
    assert "not in the model: fc_norm.weight" in message
    assert "wrong shape: norm.weight (33,) for (32,)" in message
    assert "\n" not in message
    assert all(torch.equal(value, before[name]) for name, value in twin.named_parameters())


def test_another_label_set_needs_an_explicit_skip():
    model, twin = built(), built(num_classes=9)
    state = dict(model.named_parameters())
    with pytest.raises(
        FathomsError, match=r'--initial-head new \(in Python load_weights with skip=\["head\*"\]\)'
    ):
        fathoms.load_weights(twin, state)
    report = fathoms.load_weights(twin, state, skip=["head*"])
    assert report.skipped == ("head.weight", "head.bias")
    assert torch.equal(twin.norm.weight, model.norm.weight)
    with pytest.raises(FathomsError, match="skip pattern 'heads' matches no parameter"):
        fathoms.load_weights(twin, state, skip=["heads"])


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


@pytest.mark.parametrize("name", ["model.pth", "model.pt", "model.bin", "model.safetensors"])
def test_a_pickle_is_never_opened(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_bytes(pickle.dumps({"stem.proj.weight": Bomb()}))
    with pytest.raises(FathomsError, match="safetensors"):
        fathoms.load_weights(built(), name)
    assert not Path("exploded").exists()


def lying(length, header):
    return struct.pack("<Q", length) + json.dumps(header).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        lying(2**62, {}),
        lying(9, {}),
        lying(61, {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}),
        lying(60, {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 400]}}),
        lying(3, []),
    ],
    ids=["empty", "short", "huge header", "no header", "huge shape", "no data", "list"],
)
def test_lying_headers_are_refused_in_one_line(content, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(FathomsError, match="not a readable safetensors file") as caught:
        fathoms.load_weights(built(), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.safetensors", "no such file"),
        ({"a": 3}, "not a mapping of names to tensors"),
        ({"a": torch.ones(1)}, "neither fathoms' nor timm's names"),
        ({}, "not a mapping of names to tensors"),
    ],
)
def test_other_sources_are_refused(source, message):
    with pytest.raises(FathomsError, match=message):
        fathoms.load_weights(built(), source)


def test_saving_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(FathomsError, match="saved as .safetensors"):
        fathoms.save_weights(built(), tmp_path / "model.pt")
    with pytest.raises(FathomsError, match="the folder does not exist"):
        fathoms.save_weights(built(), tmp_path / "no" / "model.safetensors")
    with pytest.raises(FathomsError, match="no layout is called 'tim'; did you mean 'timm'"):
        fathoms.save_weights(built(), tmp_path / "model.safetensors", layout="tim")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    fathoms.save_weights(built(), path)
    before = path.read_bytes()

    def fail(*_args, **_options):
        raise OSError("disk full")

    monkeypatch.setattr("fathoms.models.weights.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        fathoms.save_weights(built(), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """The two responses of the Hub that a download needs: what a revision is, and one file of it."""

    folder: Path
    asked: list[str]

    def do_GET(self):
        self.asked.append(self.path)
        if "/api/models/" in self.path:
            self.respond(
                json.dumps({"id": "timm/tiny", "sha": COMMIT, "siblings": []}).encode(), "application/json"
            )
        else:
            self.do_HEAD()

    def do_HEAD(self):
        if self.path == "/":
            self.respond(b"", "text/plain")
            return
        _, _, repo, _, commit, name = self.path.split("/")
        file = self.folder / repo / name
        if commit != COMMIT or not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.respond(file.read_bytes(), "application/octet-stream")

    def respond(self, body, kind):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"etag"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_args):
        pass


@pytest.fixture
def hub_server(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.folder, Hub.asked = tmp_path / "server", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_hub_weights_are_read_at_one_commit(hub_server, monkeypatch, revision):
    model = built(**CAIT)
    (Hub.folder / "tiny").mkdir(parents=True)
    fathoms.save_weights(model, Hub.folder / "tiny" / "model.safetensors", layout="timm")
    fetch = model_sources.fetch
    monkeypatch.setattr(model_sources, "fetch", lambda hub_id: fetch(hub_id, endpoint=hub_server))
    twin = other(model)
    report = fathoms.load_weights(twin, f"timm/tiny{revision}")
    assert report.source == f"hf-hub:timm/tiny@{COMMIT}"
    assert torch.allclose(twin(images()), model(images()), atol=1e-6)
    downloads = [path for path in Hub.asked if "/resolve/" in path]
    assert downloads
    assert all(COMMIT in path and path.endswith("model.safetensors") for path in downloads)


def test_a_hub_repository_without_safetensors_is_refused(hub_server):
    (Hub.folder / "tiny").mkdir(parents=True)
    (Hub.folder / "tiny" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(FathomsError, match="holds no model.safetensors, and nothing else is opened"):
        model_sources.fetch("timm/tiny", endpoint=hub_server)
    assert not any("pytorch_model" in path for path in Hub.asked)


def test_half_precision_files_fill_float32_models(tmp_path):
    model = built()
    fathoms.save_weights(model, tmp_path / "model.safetensors")
    half = {name: value.bfloat16() for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(half, tmp_path / "half.safetensors")
    twin = other(model)
    fathoms.load_weights(twin, tmp_path / "half.safetensors")
    assert twin.stem.proj.weight.dtype == torch.float32
    assert torch.allclose(twin.stem.proj.weight, model.stem.proj.weight, rtol=1e-2)


def test_a_misfit_is_told_as_the_settings_that_differ():
    small = {"image_size": 8, "patch_size": 2, "dim": 8, "heads": 2, "depth": 2, "num_classes": 3}
    state = fathoms.ViT(ViTConfig(**small)).state_dict()
    for changes, message in [
        (
            {"dim": 16, "depth": 4},
            "depth 2 against 4, dim 8 against 16; build it with --depth 2 --dim 8, or give the --model",
        ),
        ({"registers": 4}, "registers 0 against 4; build it with --registers 0"),
        ({"num_classes": 5}, "num_classes 3 against 5; to start a new classifier, give --initial-head new"),
        ({"distill_token": True}, "distill_token False against True; build it with --no-distill-token"),
        ({"patch_size": 4}, "patch_size 2 against 4; build it with --patch-size 2"),
    ]:
        with pytest.raises(FathomsError) as caught:
            fathoms.load_weights(fathoms.ViT(ViTConfig(**{**small, **changes})), state)
        assert f"does not fit the model: {message}" in str(caught.value)


def test_a_class_token_beside_a_pooled_mean_is_timm_s_fc_norm(tmp_path):
    """DyT's own ViTs and MAE's: the class token is kept, the patches are averaged, their mean is normed."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5}
    theirs = timm.models.vision_transformer.VisionTransformer(**sizes, global_pool="avg").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    assert "fc_norm.weight" in theirs.state_dict()
    model = built(readout="mean_cls")
    fathoms.load_weights(model, theirs.state_dict())
    assert torch.allclose(model(images()), theirs(images()), atol=1e-5)
    assert torch.allclose(model.forward_head(model.forward_features(images())), model(images()), atol=1e-6)
    fathoms.save_weights(model, tmp_path / "w.safetensors", layout="timm")
    theirs.load_state_dict(load_file(tmp_path / "w.safetensors"))
    assert torch.allclose(model(images()), theirs(images()), atol=1e-5)
    for readout in ("cls", "mean"):
        with pytest.raises(FathomsError, match="build the model with readout='mean_cls'"):
            fathoms.load_weights(built(readout=readout), theirs.state_dict())


VALUELESS = {
    "NoneType holds none": None,
    "1 is no name of a parameter": {1: torch.ones(1)},
    "on the meta device": {"stem.proj.weight": torch.ones(1, device="meta")},
    "is sparse or": {"stem.proj.weight": torch.ones(1).to_sparse()},
}


@pytest.mark.plain
@pytest.mark.parametrize("says", VALUELESS)
def test_a_state_without_values_is_refused_in_one_line(says):
    with pytest.raises(FathomsError, match=says):
        load_weights(fathoms.create_model("vit_digits", depth=1), VALUELESS[says])


@pytest.mark.plain
def test_images_that_are_no_floats_are_refused_in_one_line():
    model = fathoms.create_model("vit_digits", depth=1)
    for images in (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), np.zeros((1, 1, 8, 8), np.float32)):
        with pytest.raises(ShapeError, match=r"give a tensor of floats"):
            model.embed(images)
