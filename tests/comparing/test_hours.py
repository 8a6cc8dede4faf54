"""Hours of a plan on ImageNet: what was measured, what is estimated from it and how well, and where nothing is said."""

import json
import re
from pathlib import Path

import pytest
import torch

from fathoms.comparing.hours import IMAGES, MEASURED, hours_lines, hours_of, speed_of
from fathoms.comparing.presets import PRESETS
from fathoms.models.vit import ViT
from fathoms.models.zoo import model_config
from fathoms.training.job import Job, RunOptions, job_of

RESULTS = Path(__file__).parents[2] / "results"
ROWS = {
    "vit_layernorm_embed_dim192_patch16_head3_depth36": ("vit_192x36", "fathoms"),
    "vit_learnable_scaler_embed_dim192_patch16_head3_depth36": ("vit_192x36_scaler", "learnable_scaler"),
    "vit_small_patch16_224": ("vit_small", "fathoms"),
    "vit_base_patch16_224": ("vit_base", "fathoms"),
    "cait_xxs24_224": ("cait_xxs24_224", "fathoms"),
    "cait_s24_224": ("cait_s24_224", "fathoms"),
}


def job(model, recipe=None, **options) -> Job:
    return job_of("images", model, recipe, options, {}, RunOptions())


def measured(row, side):
    return json.loads((RESULTS / "models.json").read_text())["rows"][row][side]["images_per_second"]


@pytest.mark.parametrize("name", MEASURED)
def test_the_basis_is_what_was_measured_of_that_model(name):
    attention, width, multiplications, rate = MEASURED[name]
    with torch.device("meta"):
        model = ViT(model_config(name))
    assert (model.config.attention, model.config.dim) == (attention, width)
    assert model.flop_count() == multiplications
    assert rate == pytest.approx(measured(*ROWS[name]), abs=0.005)
    found = speed_of(job(name))
    assert found is not None
    assert found[0] == rate
    assert found[2] == f"as measured for {name}"


@pytest.mark.parametrize("name", ["cait_s24_384", "cait_xs24_384"])
def test_an_estimate_is_within_a_factor_of_a_half_of_models_that_it_does_not_know(name):
    """1.31 and 1.41 times what was measured: images of 384 pixels are slower than their multiplications say."""
    found = speed_of(job(name))
    assert found is not None
    assert 1 / 1.5 < found[0] / measured(name, "fathoms") < 1.5
    assert found[2].startswith("estimated from ")


def test_the_hours_are_those_of_the_table_of_many_gpus():
    """docs/speed.md: 12.9 hours on one GPU and, over NVLink, 1.6 on eight, each of which has the whole batch of 256."""
    name = "vit_learnable_scaler_embed_dim192_patch16_head3_depth36"
    found = hours_of(job(name, "learnable_scaler_300"))
    assert found is not None
    assert found[0] == pytest.approx(300 * IMAGES / 8259.57 / 3600)
    assert f"{found[0]:.1f}" == "12.9"
    row = json.loads((RESULTS / "many_gpus.json").read_text())["rows"]["learnable_scaler_300"]
    # The same exchange of gradients, once for each update of 2,048 images.
    updates = 300 * IMAGES / 2048
    exchange = updates * row["exchange_ms"]["NVLink"] / 1e3 / 3600
    assert found[1] == pytest.approx(found[0] / 8 + exchange, rel=1e-4)
    assert f"{found[1]:.1f}" == "1.6"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("vit_digits", {}),
        ("timm/vit_small_patch16_224", {}),
        ("vit_small_patch16_224", {"grad_checkpointing": True}),
        ("vit_small_patch16_224", {"precision": "fp32"}),
        ("vit_small_patch16_224", {"torchcompile": "none"}),
        ("cait_m36_384", {}),
    ],
)
def test_where_nothing_was_measured_nothing_is_said(model, options):
    assert hours_of(job(model, **options)) is None
    assert hours_lines([("a", job(model, **options))], 3) == []


def test_arms_of_the_same_hours_share_a_line_and_one_that_is_not_known_leaves_out_the_sum():
    small, tiny = job("vit_small_patch16_224", epochs=90), job("vit_tiny_patch16_224", epochs=90)
    lines = hours_lines([("a", small), ("b", small), ("c", tiny)], 5)
    hours = 90 * IMAGES / measured("vit_small", "fathoms") / 3600
    assert lines[1].startswith(f"  {hours:.1f}, ")
    assert lines[1].endswith("(as measured for vit_small_patch16_224): a; b")
    assert re.search(
        r"\(estimated from 1\.2\d G multiplications at 29 T/s, as measured by width\): c$", lines[2]
    )
    one = hours_of(tiny)
    assert one is not None
    whole = 5 * (2 * hours + one[0])
    assert lines[3] == f"  {whole:.1f}, {whole / 8:.1f}: all 15 runs, each on one GPU"
    digits = hours_lines([("a", small), ("d", job("vit_digits"))], 5)
    assert digits[-1] == "  not known: d"
    assert len(digits) == 3


@pytest.mark.parametrize("preset", ["learnable_scaler", "dual_patch_norm", "cait_ablation"])
def test_a_dry_run_says_the_hours_of_every_arm_and_a_run_does_not(preset, comparisons, capsys):
    words = ("--preset", preset, "--seeds", "1", "--epochs", "300", "--dry-run", "--no-pilot")
    from fathoms.cli.main import main
    from fathoms.comparing.dry_run import describe

    where = ("--output", str(comparisons.root), "--experiment", "c")
    assert main(["compare", "digits", *words, *where]) == 0
    # Lines of a terminal, with what was wrapped put back.
    printed = re.sub(r"\n {4}", " ", capsys.readouterr().out)
    assert "hours of a run on ImageNet's 1,281,167 images" in printed
    arms = PRESETS[preset]["arms"]
    lines = [line for line in printed.splitlines() if re.match(r"  [\d.,]+, [\d.,]+ \(", line)]
    assert all(any(re.search(rf"[:;] {re.escape(arm)}(,|;|$)", line) for line in lines) for arm in arms)
    assert re.search(r"all \d+ runs, each on one GPU", printed)
    comparison = comparisons.make("--preset", preset, "--seeds", "1", beside=False)
    assert "hours of a run" not in describe(comparison)
