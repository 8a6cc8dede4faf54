"""Precision policies: the dtype of the stream under each, and the options that contradict them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fathoms.errors import ConfigError
from fathoms.train.precision.master_weights import ComputeCopy
from fathoms.train.precision.policy import PRECISIONS, set_stream
from fathoms.train.recipe.recipe import Recipe
from tiny_models import layerscale_vit, random_images


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_stream_has_the_dtype_of_the_policy(precision):
    model = layerscale_vit()
    set_stream(model, precision)
    module = ComputeCopy(model).module if precision == "bf16" else model
    seen = []
    module.blocks[-1].register_forward_hook(lambda _module, _inputs, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision != "fp32"):
        module(random_images(6))
    wide = precision in ("fp32", "autocast_fp32_stream")
    assert seen == [torch.float32 if wide else torch.bfloat16]


def test_a_policy_leaves_nothing_of_the_one_before():
    model = layerscale_vit()
    set_stream(model, "autocast_fp32_stream")
    set_stream(model, "autocast")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.forward_features(random_images(6)).dtype == torch.bfloat16


def test_a_precision_given_by_hand_overrides_the_amp_of_a_recipe():
    joined = Recipe.join({"amp": True}, {"precision": "bf16"})
    assert (joined.precision, joined.amp) == ("bf16", None)
    assert Recipe.join({"precision": "bf16"}, {"precision": "auto"}) == Recipe()


@pytest.mark.parametrize("amp", [True, False])
def test_a_flag_for_mixed_precision_overrides_the_precision_of_a_recipe(amp):
    joined = Recipe.join({"precision": "bf16"}, {"amp": amp})
    assert (joined.amp, joined.precision) == (amp, "auto")


def test_two_flags_that_decide_the_precision_are_refused_by_their_names():
    with pytest.raises(ConfigError, match="^--no-amp and --precision decide the same; leave one of them out"):
        Recipe.join({}, {"amp": False, "precision": "bf16"})


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="--amp and --precision decide the same"):
        Recipe(precision="fp32", amp=True)
    with pytest.raises(ConfigError, match="float16"):
        Recipe(precision="bf16", amp_dtype="float16")
    with pytest.raises(ConfigError, match="needs --torchcompile"):
        Recipe(torchcompile="none", compile_scope="blocks")
    with pytest.raises(ConfigError, match="fathoms models"):
        set_stream(nn.Linear(2, 2), "autocast_fp32_stream")
