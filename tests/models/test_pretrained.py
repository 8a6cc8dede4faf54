"""A model saved to a folder or the Hub is built again from there, weight for weight."""

from __future__ import annotations

import json

import pytest
import torch

from fathoms import FathomsError, ViT, create_model, load_run
from fathoms.errors import WeightsError

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
