"""Every combination of the switches works or is refused with a reason, and no two are the same model."""

from __future__ import annotations

import itertools
import zlib

import pytest
import torch

from fathoms import FathomsError, ViT, ViTConfig
from fathoms.parts import ATTENTIONS, MLPS, NORMS, POSITIONS, READOUTS, RESIDUALS, STEM_NORMS
from fathoms.parts.residual import PLACEMENTS

TINY = {
    "image_size": 4,
    "patch_size": 2,
    "in_channels": 1,
    "num_classes": 3,
    "dim": 8,
    "heads": 2,
    "depth": 4,
}
IMAGES = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0)).double()
DIRECTION = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).double()


def built(**switches):
    torch.manual_seed(0)
    return ViT(ViTConfig(**TINY | {"mlp_ratio": 2.0} | switches)).double()


def perturb(model):
    """Move every parameter by an amount that depends on its name, so that equal starts part ways."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)


def fingerprint(model):
    """Logits at the start, the size of the weights there, and logits after a perturbation, to 10 digits.

    In float64 the same function agrees to more digits than that, and another one does not.
    """
    with torch.no_grad():
        start = model(IMAGES).flatten()
        size = sum(parameter.abs().sum() for parameter in model.parameters())
        perturb(model)
        moved = model(IMAGES).flatten()
    return tuple(f"{number:.9e}" for number in [*start.tolist(), float(size), *moved.tolist()])


def check_gradients(model, label):
    logits = model(IMAGES)
    (logits * DIRECTION).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{label}: no gradient for {name}"
        assert parameter.grad.isfinite().all(), f"{label}: gradient of {name} is not finite"


def refusal(norm, attn, mlp, residual):
    """Whether the papers leave this combination without a meaning; written apart from the code's own rule."""
    if norm == "none" and (attn, mlp) != ("pre", "pre"):
        return True
    if residual == "deepnorm":
        return norm == "none" or (attn, mlp) != ("post", "post")
    if residual == "layernorm_scaling":
        return norm == "none" or {attn, mlp} - {"pre", "pre_post"} != set()
    return False


# Ten thousand models: the run-time type checker, which other tests run under, would double the time.
@pytest.mark.plain
@pytest.mark.slow
@pytest.mark.parametrize("norm", list(NORMS))
def test_every_combination_works_or_is_refused_and_none_equals_another(norm):
    seen = {}
    refused = 0
    for attn, mlp, residual, stem, readout in itertools.product(
        PLACEMENTS, PLACEMENTS, RESIDUALS, STEM_NORMS, READOUTS
    ):
        label = f"{norm} {attn}/{mlp} {residual} {stem} {readout}"
        switches = {"norm": norm, "attn_placement": attn, "mlp_placement": mlp}
        switches |= {"residual": residual, "stem_norm": stem, "readout": readout}
        if refusal(norm, attn, mlp, residual):
            refused += 1
            with pytest.raises(FathomsError, match="norm|placement") as caught:
                ViTConfig(**TINY, **switches)
            assert "\n" not in str(caught.value)
            continue
        model = built(**switches)
        check_gradients(model, label)
        mark = fingerprint(model)
        assert mark not in seen, f"{label} is the same model as {seen[mark]}"
        seen[mark] = label
    assert len(seen) + refused == 16 * len(RESIDUALS) * len(STEM_NORMS) * len(READOUTS)


def test_every_name_of_every_family_changes_the_function_or_the_start():
    families = {
        "norm": list(NORMS),
        "final_norm": list(NORMS),
        "residual": [name for name in RESIDUALS if "pre" in RESIDUALS.metadata(name).placements],
        "attention": [name for name in ATTENTIONS if not ATTENTIONS.metadata(name).reads_context],
        "qk_norm": ["none", "rmsnorm", "layernorm"],
        "position": list(POSITIONS),
        "stem_norm": list(STEM_NORMS),
        "readout": list(READOUTS),
        "mlp": list(MLPS),
        "qkv_bias": [True, False],
        "registers": [0, 1, 4],
        "distill_token": [False, True],
        "norm_by_depth": [None, "0:dyt", "1-2:dyt"],
    }
    for field, names in families.items():
        marks = [fingerprint(built(**{field: name})) for name in names]
        assert len(set(marks)) == len(names), f"two of {field}={names} are the same model"


@pytest.mark.parametrize(
    ("norm", "inits"), [("learnable_scaler", ["normal", "ones"]), ("dyt", [0.5, 0.8]), ("derf", [0.5, 0.8])]
)
def test_every_norm_init_changes_the_start(norm, inits):
    assert len({fingerprint(built(norm=norm, norm_init=init)) for init in inits}) == len(inits)


@pytest.mark.parametrize("readout", ["cls", "class_attention"])
def test_each_class_attention_depth_and_drop_path_is_read(readout):
    if readout == "class_attention":
        assert (
            len({fingerprint(built(readout=readout, class_attention_depth=depth)) for depth in (1, 2, 3)})
            == 3
        )
    rates = [
        block.attn_join.drop_path.rate for block in built(drop_path=0.3, drop_path_schedule="linear").blocks
    ]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert {block.mlp_join.drop_path.rate for block in built(drop_path=0.3).blocks} == {0.3}
