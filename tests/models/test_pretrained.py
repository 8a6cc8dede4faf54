"""A model saved to a folder or the Hub is built again from there, weight for weight."""

from __future__ import annotations

import json

import pytest
import torch

import fathoms
from fathoms import FathomsError, ViT, create_model, load_run
from fathoms.errors import WeightsError
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.models.pretrained import STEPS

TINY = {"depth": 2, "dim": 48, "heads": 4, "image_size": 16, "patch_size": 8, "num_classes": 5}


def tiny():
    torch.manual_seed(0)
    return create_model("cait_xxs24_224", **TINY).eval()


def test_a_saved_model_is_built_again_with_its_config_and_weights(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "saved")
    again = ViT.from_pretrained(tmp_path / "saved")
    images = torch.randn(3, 3, 16, 16)
    assert again.config == model.config
    assert torch.equal(model(images), again(images))


def test_a_saved_model_is_a_checkpoint_of_the_commands_too(tmp_path):
    model = tiny()
    path = model.save_pretrained(tmp_path / "saved")
    images = torch.randn(3, 3, 16, 16)
    assert torch.equal(model(images), load_run(str(path)).model(images))


def test_another_image_size_resizes_the_positions(tmp_path):
    tiny().save_pretrained(tmp_path)
    larger = ViT.from_pretrained(tmp_path, image_size=32)
    assert larger(torch.randn(1, 3, 32, 32)).shape == (1, 5)


def test_a_model_goes_to_the_hub_and_back(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    from hub_store import stand_in

    store = stand_in(tmp_path / "hub", monkeypatch)
    model = tiny()
    name = model.push_to_hub("me/cait")
    assert store.private == {"me/cait": True}
    images = torch.randn(3, 3, 16, 16)
    for source in (name, "hf-hub:me/cait"):
        assert torch.equal(model(images), ViT.from_pretrained(source)(images))


def test_a_config_that_does_not_fit_its_weights_is_refused(tmp_path):
    tiny().save_pretrained(tmp_path)
    card = tmp_path / "model.safetensors.json"
    card.write_text(card.read_text().replace('"depth": 2', '"depth": 9999'))
    with pytest.raises(FathomsError, match="too few"):
        ViT.from_pretrained(tmp_path)


@pytest.mark.parametrize("card", [{}, {"config": 3}, {"config": {"nrom": "dyt"}}])
def test_a_card_that_says_no_model_is_one_line(tmp_path, card):
    tiny().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.json").write_text(json.dumps(card))
    with pytest.raises(FathomsError) as caught:
        ViT.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_answered_without_the_network(tmp_path):
    with pytest.raises(FathomsError, match="no such file or folder"):
        ViT.from_pretrained(tmp_path / "none")
    (tmp_path / "run").mkdir()
    with pytest.raises(FathomsError, match="load_run"):
        ViT.from_pretrained(tmp_path / "run")


def test_saving_to_the_name_of_a_file_is_one_line(tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(
        WeightsError, match=r"^save_pretrained: .*notes: is a file, not a folder; give another name$"
    ):
        tiny().save_pretrained(tmp_path / "notes")
    with pytest.raises(WeightsError, match="cannot be made"):
        tiny().save_pretrained(tmp_path / "notes" / "saved")
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_model_of_load_run_keeps_its_preprocessing_and_class_names(tmp_path):
    steps = {"crop_pct": 0.8, "interpolation": "bilinear", "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    first = tiny().save_pretrained(tmp_path / "first", preprocessing=steps, classes=list("abcde"))
    loaded = load_run(first)
    loaded.model.save_pretrained(tmp_path / "second")
    ViT.from_pretrained(tmp_path / "second").save_pretrained(tmp_path / "third")
    third = load_run(tmp_path / "third")
    assert third.preprocessing.to_dict() == loaded.preprocessing.to_dict() == steps
    assert third.classes == tuple("abcde")
    assert not third.assumed


def test_a_preprocessing_is_saved_as_load_run_gives_it(tmp_path):
    seen = Preprocessing(crop_pct=0.7, mean=(0.5, 0.5, 0.5))
    path = tiny().save_pretrained(tmp_path, preprocessing=seen)
    assert load_run(path).preprocessing == seen
    assert tuple(Preprocessing.__dataclass_fields__) == STEPS


def test_a_preprocessing_that_nothing_says_is_null_in_the_card_and_assumed(tmp_path):
    tiny().save_pretrained(tmp_path)
    card = json.loads((tmp_path / "model.safetensors.json").read_text())
    assert card["preprocessing"] is None
    assert card["classes"] is None
    assert load_run(tmp_path).assumed
    assert load_run(tmp_path).model.card == {"model": "vit"}


def test_a_new_classifier_has_no_old_class_names(tmp_path):
    path = tiny().save_pretrained(tmp_path, classes=list("abcde"))
    model = load_run(path).model
    model.reset_classifier(5)
    model.save_pretrained(tmp_path / "new")
    assert load_run(tmp_path / "new").classes is None


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"classes": ["a", "b"]}, "2 classes are named and the model has 5"),
        ({"preprocessing": {"maen": (1, 1, 1)}}, "'mean'"),
        ({"preprocessing": {"std": (1, 1, 0)}}, "std must be three numbers"),
        ({"preprocessing": {"mean": 0.5}}, "mean must be three numbers"),
        ({"preprocessing": {"interpolation": "cubic"}}, "bicubic"),
        ({"preprocessing": {"crop_pct": 10**400}}, "crop_pct"),
    ],
)
def test_a_card_that_could_not_be_read_is_not_written(tmp_path, about, message):
    with pytest.raises(FathomsError, match=message):
        tiny().save_pretrained(tmp_path / "saved", **about)
    assert not (tmp_path / "saved").exists()


def swapped_in_part(norm):
    model = create_model("vit_tiny_patch16_224", **TINY, norm=norm)
    fathoms.swap_norms(model, "derf", only=["blocks.0.*"], how="reset")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: fathoms.fold(tiny())[0],
        lambda: swapped_in_part("layernorm"),
        lambda: swapped_in_part("dyt"),
    ],
    ids=["folded", "swapped in part", "swapped under the same names"],
)
def test_a_model_that_its_config_does_not_describe_is_refused_before_anything_is_written(tmp_path, make):
    with pytest.raises(WeightsError, match=r"no ViTConfig describes this model .*save it before that"):
        make().save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_folded_model_that_is_a_plain_network_makes_the_round_trip(tmp_path):
    folded, _ = fathoms.fold(create_model("vit_tiny_patch16_224", **TINY, norm="learnable_scaler").eval())
    folded.save_pretrained(tmp_path)
    images = torch.randn(3, 3, 16, 16)
    assert torch.equal(folded(images), ViT.from_pretrained(tmp_path)(images))


@pytest.mark.parametrize("opened", [ViT.from_pretrained, load_run])
def test_a_flipped_bit_is_found(tmp_path, opened):
    path = tiny().save_pretrained(tmp_path)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="damaged or replaced"):
        opened(tmp_path)


def test_folder_weights_and_card_name_the_same_model(tmp_path):
    model = tiny()
    path = model.save_pretrained(tmp_path / "saved", classes=list("abcde"))
    images = torch.randn(3, 3, 16, 16)
    for name in (path.parent, path, f"{path}.json"):
        loaded = load_run(name)
        assert torch.equal(model(images), loaded.model(images))
        assert loaded.classes == tuple("abcde")
        assert torch.equal(model(images), ViT.from_pretrained(name)(images))
    other = create_model("cait_xxs24_224", **TINY, weights=str(path.parent)).eval()
    assert torch.equal(model(images), other(images))


def test_the_folder_may_be_the_one_that_python_runs_in(tmp_path, monkeypatch):
    tiny().save_pretrained(tmp_path, classes=list("abcde"))
    monkeypatch.chdir(tmp_path)
    assert load_run(".").classes == tuple("abcde")
    assert ViT.from_pretrained(".").card["classes"] == tuple("abcde")


def test_a_card_without_its_weights_is_one_line(tmp_path):
    path = tiny().save_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(WeightsError, match=r"is the card of model.safetensors, which is not next to it"):
        load_run(f"{path}.json")
    with pytest.raises(WeightsError, match=r"no such file"):
        load_run(tmp_path)


def test_a_source_that_is_not_there_is_told_what_from_pretrained_takes(tmp_path):
    takes = r"^from_pretrained: .*a folder of save_pretrained.*hf-hub:OWNER/NAME"
    for source in (tmp_path / "none", "vit_digit", "vit_digits", "timm/vit_tiny_patch16_224"):
        with pytest.raises(WeightsError, match=takes):
            ViT.from_pretrained(source)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(WeightsError, match=takes):
        ViT.from_pretrained(tmp_path / "notes.txt")
    fathoms.save_weights(tiny(), tmp_path / "alone.safetensors")
    with pytest.raises(WeightsError, match=r"has no card alone.safetensors.json .*create_model"):
        ViT.from_pretrained(tmp_path / "alone.safetensors")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 3}, r"num_classes=3: .* has 5 classes; .*reset_classifier\(3\)"),
        ({"depth": 3}, r"depth=3: .*another model \(depth 2 against 3\); leave it out"),
        # These fit by shape and would be another function.
        ({"heads": 1}, r"heads=1: .*another model \(heads \d against 1\); leave it out"),
        (
            {"attn_placement": "post"},
            r"attn_placement='post': .*another model \(attn_placement pre against post\)",
        ),
        ({"image_sise": 32}, "'image_size'"),
    ],
)
def test_errors_name_the_arguments_of_from_pretrained(tmp_path, options, message):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(FathomsError, match=f"^from_pretrained: .*{message}") as caught:
        ViT.from_pretrained(tmp_path, **options)
    assert "--" not in str(caught.value)
    assert "skip=" not in str(caught.value)


def test_load_run_names_no_flag_of_training_for_another_number_of_classes(tmp_path):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="num_classes 5 against 3; leave --num-classes out") as caught:
        load_run(tmp_path, num_classes=3)
    assert "--initial-head" not in str(caught.value)
