"""A run folder that somebody else has touched: nothing outside it is cut, written or waited for."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import pytest
from safetensors.torch import save_file

from fathoms.cli.main import main

pytestmark = pytest.mark.plain

WORDS = ["train", "--depth", "1", "--dim", "8", "--heads", "2", "--epochs", "1", "--batch-size", "400"]
WORDS += ["--device", "cpu", "--experiment", "run"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    assert main([*WORDS, "--output", str(folder)]) == 0
    return folder / "run"


@pytest.fixture
def run(finished, place):
    return shutil.copytree(finished, place / "runs" / "run")


def rewrite(last, change):
    """Edit state.json as an attacker would: the manifest gets the new hash."""
    state = json.loads((last / "state.json").read_text())
    change(state)
    (last / "state.json").write_text(json.dumps(state))
    manifest = json.loads((last / "manifest.json").read_text())
    manifest["state.json"] = hashlib.sha256((last / "state.json").read_bytes()).hexdigest()
    (last / "manifest.json").write_text(json.dumps(manifest))


STATES = {
    "a path among the lines": lambda s: s["lines"].update({"../../../victim": 0}),
    "an absolute path among the lines": lambda s: s["lines"].update({"/tmp/victim.jsonl": 0}),
    "a length below zero": lambda s: s["lines"].update({"metrics.jsonl": -1}),
    "a text for a length": lambda s: s["lines"].update({"metrics.jsonl": "0"}),
    "lines as a list": lambda s: s.update(lines=[["metrics.jsonl", 0]]),
    "an epoch below zero": lambda s: s.update(epoch=-1),
    "an epoch of 30 digits": lambda s: s.update(epoch=10**30),
    "a text for an epoch": lambda s: s.update(epoch="1"),
    "half a batch": lambda s: s.update(batch=0.5),
    "yes for updates": lambda s: s.update(updates=True),
    "sums of the wrong length": lambda s: s.update(sums=[1.0]),
    "sums of texts": lambda s: s.update(sums=["a"] * 4),
    "nested sums": lambda s: s.update(sums=[[1.0]] * 4),
    "no identity": lambda s: s.pop("identity"),
    "an identity that is a list": lambda s: s.update(identity=[1]),
    "no optimizer": lambda s: s.pop("optimizer"),
    "an optimizer without names": lambda s: s["optimizer"].update(parameters=3),
    "seconds below zero": lambda s: s.update(seconds=-5),
    "seconds of 400 digits": lambda s: s.update(seconds=10**400),
    "sums of 400 digits": lambda s: s.update(sums=[[10**400] * 4]),
    "a best that is a number": lambda s: s.update(best=3),
    "a best without its accuracy": lambda s: s.update(best={"epoch": 0}),
    "a best without its epoch": lambda s: s.update(best={"top1": 1.0}),
    "a last whose accuracy is a text": lambda s: s.update(last={"top1": "1"}),
    "a scale that is a text": lambda s: s.update(scaler={"scale": "1"}),
    "a guard that is a list": lambda s: s.update(guard=[1]),
    "a guard with texts": lambda s: s["guard"].update(losses=["a"]),
    "a guard without counts": lambda s: s["guard"].pop("skipped"),
    "another version": lambda s: s.update(version="../1"),
}


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_no_run_wrote_is_refused_and_cuts_no_file(kind, run, place, capsys):
    victim = place / "victim"
    victim.write_text("precious")
    rewrite(run / "checkpoints" / "last", STATES[kind])
    capsys.readouterr()
    assert main([*WORDS, "--output", "runs"]) == 2
    printed = capsys.readouterr().err
    assert printed.splitlines()[-1].isprintable()
    assert "Traceback" not in printed
    assert victim.read_text() == "precious"


LINKS = {
    "the lock": ".lock",
    "the metrics": "metrics.jsonl",
    "the config": "config.toml",
    "the summary": "summary.json",
    "a temporary checkpoint": "checkpoints/.last.tmp",
    "weights": "checkpoints/last/model.safetensors",
    "a checkpoint": "checkpoints/previous",
    "all checkpoints": "checkpoints",
}


@pytest.mark.parametrize("kind", LINKS)
def test_a_run_does_not_write_through_a_link(kind, run, place, refused):
    outside = place / "outside"
    path = run / LINKS[kind]
    if path.is_dir() or kind in ("a temporary checkpoint", "a checkpoint"):
        outside.mkdir()
        (outside / "precious").write_text("precious")
        shutil.rmtree(path, ignore_errors=True)
    else:
        outside.write_text("precious")
        path.unlink()
    path.symlink_to(outside)
    refused(*WORDS, "--output", "runs", says="is a link or a device")


def test_a_pipe_among_the_weights_is_not_waited_for(run, refused):
    path = run / "checkpoints" / "last" / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    refused(*WORDS, "--output", "runs", says="is a link or a device")


@pytest.mark.filterwarnings("ignore:.*damaged")
@pytest.mark.parametrize("manifest", ["{}", "[]", "3", "[" * 100_000, '{"state.json": 5}', '{"../x": "0"}'])
def test_a_manifest_that_vouches_for_nothing_is_no_manifest(manifest, run, capsys):
    (run / "checkpoints" / "last" / "manifest.json").write_text(manifest)
    capsys.readouterr()
    assert main([*WORDS, "--output", "runs"]) == 2
    assert "no checkpoint is whole" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*damaged")
def test_weights_that_the_manifest_does_not_list_are_not_loaded(run, capsys):
    import torch

    save_file({"a": torch.ones(1)}, run / "checkpoints" / "last" / "ema.safetensors")
    assert main([*WORDS, "--output", "runs"]) == 2
    assert "no checkpoint is whole" in capsys.readouterr().err


CONFIGS = {
    "nested": "a = " + "[" * 20_000,
    "no classes": "[model]\ndepth = 1",
    "classes that are numbers": "classes = [1, 2]\n[model]\ndepth = 1",
    "classes that clear the screen": 'classes = ["a\\u001b[2J"]\n[model]\ndepth = 1',
    "a model that is a text": 'classes = ["a"]\nmodel = "x"',
    "an unknown field": 'classes = ["a"]\n[model]\n_target_ = "os.system"',
    "a recipe that is a list": 'classes = ["a"]\nrecipe = [1]\n[model]\ndepth = 1',
    "data that is a number": 'classes = ["a"]\ndata = 5\n[model]\ndepth = 1',
    "a recipe of timm's that is a list": 'classes = ["a"]\nrecipe = [1]\n[model]\nname = "timm/resnet18"',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_no_run_wrote_is_refused_in_one_line(kind, run, refused):
    text = CONFIGS[kind]
    (run / "config.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused("validate", "--checkpoint", run, "--device", "cpu", says="config.toml")


@pytest.mark.usefixtures("run")
def test_the_folder_as_it_was_resumes_and_is_measured(capsys):
    assert main([*WORDS, "--output", "runs"]) == 0
    assert main(["validate", "--checkpoint", "runs/run", "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["digits"]["images"] == 359
