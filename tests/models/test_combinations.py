"""Combinations of switches: each works or is refused with a reason, and no two are the same model.

A plain run goes through a sample that holds every pair of values; `-m full` goes through the whole product.
"""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
import torch

import fathoms
from fathoms import FathomsError, ViT, ViTConfig
from fathoms.models.param_groups import layer_of
from fathoms.models.weight_names import to_timm
from fathoms.parts import (
    ATTENTIONS,
    GATES,
    MLPS,
    NORMS,
    POSITIONS,
    READOUTS,
    RESIDUALS,
    STEM_NORMS,
    STEMS,
)
from fathoms.parts.residual_updates import Warmup
from fathoms.parts.residuals import PLACEMENTS

TINY = {
    "image_size": 4,
    "patch_size": 2,
    "in_channels": 1,
    "num_classes": 3,
    "dim": 8,
    "heads": 2,
    "depth": 4,
}
# The switches of a block and of both ends of a model; sorted, so that the sample does not follow the order of imports.
FIELDS = {
    "norm": sorted(NORMS),
    "attn_placement": sorted(PLACEMENTS),
    "mlp_placement": sorted(PLACEMENTS),
    "residual": sorted(RESIDUALS),
    "stem_norm": sorted(STEM_NORMS),
    "readout": sorted(READOUTS),
}
# Combinations drawn at random besides the pairs.
DRAWN = 200
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

    All of it at 5 % of a run, when the blocks of prores are still warming up. In float64 the same function agrees to
    more digits than that, and another one does not.
    """
    Warmup(model).set(0.05)
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


def refusal(norm, attn, mlp, residual, readout):
    """Whether the papers leave this combination without a meaning; written apart from the code's own rule."""
    if residual == "mv_split" and readout == "class_attention":
        return True
    if norm == "none" and (attn, mlp) != ("pre", "pre"):
        return True
    if residual == "deepnorm":
        return norm == "none" or (attn, mlp) != ("post", "post")
    if residual == "layernorm_scaling":
        return norm == "none" or {attn, mlp} - {"pre", "pre_post"} != set()
    return False


def is_refused(switches):
    fields = ("norm", "attn_placement", "mlp_placement", "residual", "readout")
    return refusal(*(switches[field] for field in fields))


def drawn(generator):
    return {field: generator.choice(values) for field, values in FIELDS.items()}


def pairs_of(switches):
    return set(itertools.combinations(switches.items(), 2))


def pairwise(generator, tries=200):
    """Combinations in which every pair of values of two fields occurs, found greedily.

    A pair that some model can have occurs in a model; the others (deepnorm and pre) occur in a refusal.
    """
    possible = pairs_in(switches for switches in products() if not is_refused(switches))
    chosen = []
    for missing, refused in ((possible, False), (pairs_in(products()) - possible, True)):
        while missing:
            pair = dict(min(missing))
            tried = [drawn(generator) | pair for _ in range(tries)]
            candidates = [switches for switches in tried if is_refused(switches) == refused]
            best = max(candidates, key=lambda switches: len(pairs_of(switches) & missing))
            chosen.append(best)
            missing = missing - pairs_of(best)
    return chosen


def products():
    """The full product: 49,000 combinations."""
    return (dict(zip(FIELDS, values, strict=True)) for values in itertools.product(*FIELDS.values()))


def check_all(combinations):
    """Each is refused in one line, or is a model with gradients that equals no other of them."""
    seen = {}
    for switches in combinations:
        label = " ".join(switches.values())
        if is_refused(switches):
            with pytest.raises(FathomsError, match="norm|placement|reads the mean of the patches") as caught:
                ViTConfig(**TINY, **switches)
            assert "\n" not in str(caught.value)
            continue
        model = built(**switches)
        check_gradients(model, label)
        mark = fingerprint(model)
        assert mark not in seen, f"{label} is the same model as {seen[mark]}"
        seen[mark] = label
    return len(seen)


def sample():
    """All pairs, and combinations drawn at random, each once; the same ones every time."""
    generator = random.Random(0)
    chosen = pairwise(generator) + [drawn(generator) for _ in range(DRAWN)]
    return [dict(items) for items in dict.fromkeys(tuple(switches.items()) for switches in chosen)]


def pairs_in(combinations):
    return set().union(*map(pairs_of, combinations))


def test_every_pair_of_values_is_sampled_and_in_a_model_wherever_a_model_can_have_it():
    assert pairs_in(sample()) == pairs_in(products())
    sound = [[each for each in group if not is_refused(each)] for group in (sample(), products())]
    assert pairs_in(sound[0]) == pairs_in(sound[1])


@pytest.mark.plain
def test_sampled_combinations_work_or_are_refused_and_none_equals_another():
    """The pairs and 200 drawn: 311 different ones, of which 55 are refused."""
    combinations = sample()
    assert (len(combinations), check_all(combinations)) == (311, 256)


# Thousands of models: the run-time type checker, which other tests run under, would double the time.
@pytest.mark.plain
@pytest.mark.full
@pytest.mark.parametrize("norm", list(NORMS))
def test_every_combination_works_or_is_refused_and_none_equals_another(norm):
    combinations = [switches for switches in products() if switches["norm"] == norm]
    assert check_all(combinations) == sum(not is_refused(switches) for switches in combinations)


def test_every_name_of_every_family_changes_the_function_or_the_start():
    families = {
        "norm": list(NORMS),
        "final_norm": list(NORMS),
        "residual": [name for name in RESIDUALS if "pre" in RESIDUALS.metadata(name).placements],
        "attention": [name for name in ATTENTIONS if not ATTENTIONS.metadata(name).reads_context],
        "qk_norm": ["none", "rmsnorm", "layernorm"],
        "position": list(POSITIONS),
        "stem": list(STEMS),
        "stem_norm": list(STEM_NORMS),
        "readout": list(READOUTS),
        "attn_gate": list(GATES),
        "attn_placement": list(PLACEMENTS),
        "placement_by_depth": [None, "0:post", "1-2:keel"],
        "class_token_block": [0, 1, 3],
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


@pytest.mark.parametrize(
    ("switches", "field", "values"),
    [
        ({"residual": "completep"}, "base_depth", [None, 2, 8]),
        ({"residual": "completep"}, "base_dim", [None, 4, 12]),
        ({"residual": "prores"}, "residual_warmup", [None, 0.1, 0.5]),
        ({"stem": "conv"}, "stem_kernel", [3, 5, 1]),
        ({"stem": "conv", "patch_size": 4}, "stem_layers", [1, 2]),
    ],
)
def test_every_option_of_a_part_changes_the_function(switches, field, values):
    assert len({fingerprint(built(**switches, **{field: value})) for value in values}) == len(values)


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
    assert {
        block.mlp_join.drop_path.rate for block in built(drop_path=0.3, drop_path_schedule="uniform").blocks
    } == {0.3}


@pytest.mark.parametrize("position", ["learned", "learned_rope"])
def test_an_early_distillation_token_goes_through_all_blocks_of_cait(position):
    options = {"readout": "class_attention", "distill_token": True, "position": position, "registers": 4}
    late, early = (built(**options, distill_early=choice).eval() for choice in (False, True))
    perturb(early)
    x = torch.randn(2, 1, 4, 4).double()
    seen = {}
    for name, vit in (("late", late), ("early", early)):
        blocks = [*vit.blocks, *vit.readout.blocks]
        hooks = [
            b.register_forward_pre_hook(lambda _, x, n=name: seen.setdefault(n, []).append(x)) for b in blocks
        ]
        assert [logits.shape for logits in vit.forward_heads(vit.forward_features(x))] == [(2, 3)] * 2
        assert torch.equal(vit.forward_head(vit.forward_features(x)), vit(x))
        for hook in hooks:
            hook.remove()
    patches = late.grid**2
    depth = late.config.depth
    assert {x[0].shape[1] for x in seen["late"][:depth]} == {4 + patches}
    assert {x[0].shape[1] for x in seen["early"][:depth]} == {1 + 4 + patches}
    for tokens in seen.values():
        assert {(q.shape[1], context.shape[1]) for q, context in tokens[depth : depth + 2]} == {(2, patches)}
    # The distillation token comes into the second stage as the first one leaves it.
    with torch.no_grad():
        early.readout.distill.add_(1.0)
    moved = []
    early.readout.blocks[0].register_forward_pre_hook(lambda _, x: moved.extend(x))
    early(x)
    before = seen["early"][depth]
    assert torch.equal(moved[0][:, 0], before[0][:, 0])
    assert not torch.equal(moved[0][:, 1], before[0][:, 1])
    assert not torch.equal(moved[1], before[1])
    assert fathoms.param_groups(early, 0.1, layer_decay=0.5)
    assert layer_of(early, "readout.distill") == layer_of(early, "readout.queries") == 0
    assert layer_of(early, "readout.blocks.0.mlp.fc1.weight") == max(depth - 1, 1)
    why = {
        "learned": "timm's CaiT has neither a distillation token",
        "learned_rope": "position='learned_rope'",
    }
    with pytest.raises(FathomsError, match=why[position]):
        to_timm(early.state_dict(), early.config)
    with pytest.raises(FathomsError, match="build it with --no-distill-early"):
        fathoms.load_weights(early, late.state_dict())
