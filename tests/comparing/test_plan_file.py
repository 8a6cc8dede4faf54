"""Plan files: the settings that all runs share, the baseline, and the ready plans in plans/."""

import json
import re
from pathlib import Path

import pytest

from fathoms.comparing.dry_run import describe
from fathoms.comparing.plan import Plan, check_baseline, pairs_of
from fathoms.errors import ConfigError, FathomsError, UnknownNameError

PLANS = Path(__file__).parents[2] / "plans"
PUBLISHED = PLANS.parent / "results" / "compare"


def variants(names):
    """The settings of arms of these names at two depths."""
    arms = {name: {"norm": name} for name in names}
    made = Plan({"depth": ["12", "36"]}, arms).variants()
    return {arm.name: arm.table() for arm in made}


ARMS = variants(["dyt", "layernorm"])


def plan(path, *lines):
    path.write_text("\n".join(lines))
    return str(path)


def test_settings_under_train_are_those_of_all_runs_and_flags_override_them(comparisons, tmp_path):
    table = ("[train]", "lr = 3e-4", "mlp_ratio = 2", "[axes]", 'norm = ["layernorm", "dyt"]')
    made = comparisons.make("--plan", plan(tmp_path / "plan.toml", *table), "--mlp-ratio", "3")
    for _, job in made.arms.values():
        assert job.recipe.lr == 3e-4
        assert job.config.mlp_ratio == 3


def test_a_plan_file_adds_to_a_preset_and_replaces_its_axes_of_the_same_name(comparisons, tmp_path):
    path = plan(tmp_path / "plan.toml", "[axes]", "mlp_ratio = [2, 3]", 'norm = ["dyt", "derf"]')
    made = comparisons.make("--preset", "norms", "--plan", path)
    assert [(job.config.norm, job.config.mlp_ratio) for _, job in made.arms.values()] == [
        *(("dyt", 2.0), ("dyt", 3.0)),
        *(("derf", 2.0), ("derf", 3.0)),
    ]
    path = plan(tmp_path / "depths.toml", "[axes]", "depth = [1, 2]")
    assert (
        len(
            comparisons.make(
                "--preset", "norms", "--plan", path, "--dim", "16", "--heads", "2", beside=False
            ).arms
        )
        == 10
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['train = "cifar"'], r"plan.toml: \[train\] is a table"),
        (["[train]", "nrom = 1"], r"plan.toml: \[train\]: no option is called 'nrom'; did you mean 'norm'\?"),
        (["[train]", 'norm = "lyernorm"'], r"plan.toml: \[train\] --norm: .*'layernorm'"),
        (["[train]", "lr = [1, 2]"], r"plan.toml: \[train\] lr: give one value"),
        (["[arms]", '"a\\nb" = {lr = 0.1}'], r"plan.toml: \[arms\] 'a\\nb': has control characters"),
        (["[arms]", '"" = {lr = 0.1}'], r"plan.toml: \[arms\] '': an arm has no name"),
        (["seeds = 0"], "plan.toml: seeds = 0: use 1 or more"),
        (["tune_epochs = 0", "[tune]", "lr = [1, 2]"], "plan.toml: tune_epochs = 0: use 1 or more"),
        (["[axes]", "norm = []"], r"plan.toml: \[axes\] norm: give at least 1 value$"),
        (["[tune]", "lr = [1]"], r"plan.toml: \[tune\] lr: give at least 2 values$"),
        (["[axes]", 'norm = ["dyt", "dyt"]'], r"plan.toml: \[axes\] norm: 'dyt' is there twice"),
        (["baseline = 3"], "plan.toml: baseline is the name of an arm"),
        (["[trian]", "lr = 1"], r"plan.toml: no key is called 'trian'; did you mean 'train'\?"),
        (["[arms]", "a = {opt_betas = [0.9, 0.95]}"], r"plan.toml: a: opt_betas: give one text or number"),
    ],
)
def test_a_wrong_plan_file_is_refused_with_its_name(comparisons, tmp_path, lines, said):
    path = plan(tmp_path / "plan.toml", *lines)
    with pytest.raises(FathomsError, match=said):
        comparisons.make("--plan", path, "--axis", "norm=layernorm,dyt")


def test_an_option_under_train_that_is_an_axis_is_refused(comparisons, tmp_path):
    path = plan(tmp_path / "plan.toml", "[train]", 'norm = "dyt"')
    with pytest.raises(ConfigError, match=r"leave out norm under \[train\] of .*plan.toml, or add"):
        comparisons.make("--plan", path, "--axis", "norm=layernorm,dyt")


def test_fewer_seeds_in_the_file_than_there_are_is_said_with_the_file(comparisons, tmp_path):
    comparison = comparisons.make("--axis", "norm=layernorm,dyt", "--seeds", "4")
    comparison.folder.path.mkdir(parents=True)
    comparison.folder.begin(comparison.plan())
    path = plan(tmp_path / "plan.toml", "seeds = 3", "[axes]", 'norm = ["layernorm", "dyt"]')
    said = describe(comparisons.make("--plan", path))
    assert f"the plan has 4 seeds of each arm: seeds = 3 of {path} takes none of them away" in said


def test_a_baseline_that_is_a_value_of_one_axis_is_compared_within_the_others():
    assert pairs_of(ARMS, "depth=12") == [
        ("dyt, depth=36", "dyt, depth=12"),
        ("layernorm, depth=36", "layernorm, depth=12"),
    ]
    assert len(pairs_of(ARMS, "dyt, depth=12")) == 3
    # An arm's own name may hold a comma, and begin like another's.
    arms = variants(["scaler", "scaler, ones"])
    assert pairs_of(arms, "depth=12") == [
        ("scaler, depth=36", "scaler, depth=12"),
        ("scaler, ones, depth=36", "scaler, ones, depth=12"),
    ]
    assert pairs_of(arms, "scaler") == [
        ("scaler, ones, depth=12", "scaler, depth=12"),
        ("scaler, ones, depth=36", "scaler, depth=36"),
    ]
    with pytest.raises(UnknownNameError, match=r"--baseline: .*'layernrm'.*'layernorm'"):
        check_baseline("layernrm", ARMS)


@pytest.mark.parametrize("baseline", ["ones", "scaler", "normal start"])
def test_a_piece_of_an_arms_name_is_not_a_baseline(comparisons, baseline):
    with pytest.raises(UnknownNameError, match=f"--baseline: no arm or value is called '{baseline}'"):
        comparisons.make("--preset", "scaler", "--baseline", baseline)


def test_a_baseline_that_an_arm_cannot_be_compared_with_is_refused():
    arms = {**ARMS, "odd": {"norm": "derf"}}
    with pytest.raises(ConfigError, match="--baseline 'depth=12': no arm differs from 'odd' only in it"):
        check_baseline("depth=12", arms)


def test_a_published_comparison_by_depth_has_the_pairs_of_its_plan():
    folder = PUBLISHED / "norms_by_depth"
    arms = json.loads((folder / "plan.json").read_text())["arms"]
    rows = json.loads((folder / "results.json").read_text())["verdicts"]
    assert pairs_of(arms, "layernorm") == [(row["a"], row["b"]) for row in rows]
    assert len(rows) == 10


def test_every_ready_plan_is_listed_with_its_number_of_runs(comparisons):
    listed = dict(
        re.findall(
            r"^\| \[`(\w+)`\]\S+ \|.*\| (\d+)[^|]* \|[^|]*\|$",
            (PLANS.parent / "docs" / "evidence.md").read_text(),
            re.M,
        )
    )
    assert listed.keys() == {path.stem for path in PLANS.glob("*.toml")}
    for name, runs in listed.items():
        # The digits stand for the data: nothing is trained here.
        made = comparisons.make("--plan", str(PLANS / f"{name}.toml"), name=name, beside=False)
        assert len(made.cells()) == int(runs), name
