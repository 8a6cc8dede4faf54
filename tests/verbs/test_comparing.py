"""`fathoms.compare`: the results of the command, continued by either; arms that are modules; mistakes in one line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from fathoms import Comparison, compare
from fathoms.cli.main import main
from fathoms.errors import FathomsError

SMALL = {"depth": 1, "dim": 16, "heads": 2, "warmup_epochs": 0, "epochs": 1, "device": "cpu"}
LABELS = np.arange(80) % 4
IMAGES = (
    np.random.default_rng(0).integers(0, 255, (80, 16, 16), dtype=np.uint8) // 4
    + (LABELS * 40).astype(np.uint8)[:, None, None]
)
RUN = {"epochs": 1, "warmup_epochs": 0, "device": "cpu", "show": False}


class Net(nn.Sequential):
    """A plain torch module."""

    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 4, 4), nn.GELU(), nn.Flatten(), nn.Linear(128, 4))


SHARED = Net()


def command(output, name, seeds):
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in SMALL.items()]
    axis = ["--axis", "norm=layernorm,dyt", "--seeds", str(seeds)]
    return main(["compare", *axis, f"--output={output}", f"--experiment={name}", *flags])


@pytest.mark.slow
def test_two_arms_of_three_seeds_are_the_commands_results_byte_for_byte_and_the_command_goes_on(
    tmp_path, capsys
):
    axes, where = {"norm": ["layernorm", "dyt"]}, {"output": str(tmp_path), "experiment": "python"}
    found = compare(axes=axes, seeds=3, show=False, **where, **SMALL)
    assert capsys.readouterr().out == ""
    assert command(tmp_path, "command", 3) == 0
    results = [(tmp_path / name / "results.json").read_bytes() for name in ("python", "command")]
    assert results[0] == results[1]
    said = " ".join(capsys.readouterr().out.split())
    assert found.results["answer"] in said
    last = found.table().strip().splitlines()[-1]
    assert last
    assert said.endswith(last)
    assert command(tmp_path, "python", 4) == 0
    assert "6 of 8 runs are there already" in capsys.readouterr().out
    again = compare(axes=axes, seeds=4, show=False, **where, **SMALL)
    assert len(again.rows) == 8
    assert json.loads((again.path / "plan.json").read_text())["command"][:2] == [
        "compare",
        "--axis=norm=layernorm,dyt",
    ]


def test_a_comparison_shows_its_table_verdicts_best_plot_and_page():
    found = Comparison("results/compare/stem_patch8")
    assert [verdict.to_json() for verdict in found.verdicts] == found.results["verdicts"]
    assert found.answer in repr(found)
    assert found.table() == (found.path / "table.md").read_text()
    assert found._repr_html_().startswith(f"<p><b>{found.answer}")
    assert found.plot().axes


@pytest.mark.slow
def test_modules_models_of_timm_and_names_are_compared_on_arrays_and_continue(tmp_path):
    timm = pytest.importorskip("timm")
    made = []

    def small():
        made.append(torch.initial_seed())
        return timm.create_model(
            "vit_tiny_patch16_224",
            img_size=16,
            patch_size=4,
            depth=1,
            embed_dim=16,
            num_heads=2,
            num_classes=4,
        )

    arms = {"mine": Net, "timm": {"model": small, "lr": 1e-3}, "ours": {"model": "vit_digits", "depth": 1}}
    where = {"output": str(tmp_path), "experiment": "c", "image_size": 16}
    found = compare((IMAGES, LABELS), arms=arms, seeds=2, **where, **RUN)
    assert made == [0, 0, 0, 1]
    assert [row["status"] in ("done", "stalled") for row in found.rows] == [True] * 6
    assert len({row["loss"] for row in found.rows}) == 6
    before = found.results
    longer = compare((IMAGES, LABELS), arms=arms, seeds=3, **where, **RUN)
    assert made == [0, 0, 0, 1, 0, 0, 2]
    assert [row for row in longer.rows if row["seed"] < 2] == [row for row in found.rows if row["seed"] < 2]
    assert len(before["cells"]) < len(longer.results["cells"]) == 9


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axes": {"norm": ["layernorm", "dytt"]}}, "--axis norm=dytt: no value is called 'dytt'; did you mean 'dyt'?"),
        ({"axes": {"nrom": ["dyt"]}}, "--axis: no option is called 'nrom'; did you mean 'norm'?"),
        ({"axes": {"norm": "dyt"}}, "axis: norm has 'dyt'; give a list of values"),
        ({"axes": {"norm": ["dyt"]}, "seed": 3}, "--seed: a comparison counts its seeds from 0; use --seeds"),
        ({"axes": {"norm": ["dyt"]}, "seedz": 3}, "compare: no setting is called 'seedz'"),
        ({"arms": {"a": Net()}}, "arm 'a': a module is trained once; give what makes it"),
        ({"arms": {"a": {"model": Net, "depth": 3}}}, "arm 'a': a module has no depth; leave it out"),
        ({"arms": {"a": lambda: SHARED}, "image_size": 16}, "arm 'a': its function gives one module again and again"),
        ({"arms": {"a": lambda: 3}}, "arm 'a': int is no torch.nn.Module; give what makes one"),
        ({"arms": {"a": {"norm": "dyt", "aa": "x,y"}}}, "has a comma in it"),
        ({"scores": "x.csv"}, "--scores: is for the command line; for scores there is fathoms.judge"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(tmp_path, given, message):
    with pytest.raises(FathomsError) as error:
        compare(show=False, output=str(tmp_path), **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(FathomsError, match="holds no results of a comparison"):
        Comparison(tmp_path)


class Small(nn.Sequential):
    """A module for images of 8 pixels, which no patch of 16 divides."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 4))


@pytest.mark.plain
def test_modules_take_a_size_that_the_default_model_does_not_and_names_and_seeds_of_other_kinds(tmp_path):
    data, where = (IMAGES[:, ::2, ::2], LABELS), {"output": str(tmp_path), "experiment": "c"}
    arms = {1: Small, "lower": {"model": Small, "lr": 1e-4}}
    found = compare(data, arms=arms, seeds=np.int64(1), image_size=8, **where, **RUN)
    assert sorted(row["arm_name"] for row in found.rows) == ["1", "lower"]
    assert all(row["status"] in ("done", "stalled") for row in found.rows)


@pytest.mark.plain
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": 1.5}, "seeds=1.5: give a whole number, or a list of them"),
        ({"depth": 3}, "--depth: a module has no such switch; leave it out"),
        ({"tune": {"lr": [1e-3, 2e-3]}}, "tune: arm 'a' is a module: those are not tuned; leave it out"),
        ({"axes": {"lr": [1e-3, 2e-3]}}, "axes: arm 'a' is a module, which goes with arms alone"),
    ],
)
def test_what_a_comparison_of_modules_does_not_take_is_one_line(tmp_path, given, message):
    with pytest.raises(FathomsError) as error:
        compare(arms={"a": Small}, image_size=8, output=str(tmp_path), show=False, **given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
