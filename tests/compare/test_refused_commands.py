"""Commands that cannot be a comparison: one line, exit code 2, nothing written."""

import pytest

NORMS = ("--axis", "norm=layernorm,dyt")
BAD = {
    "an axis that does not exist": (("--axis", "nrom=layernorm"), "'norm'"),
    "a value that does not exist": (("--axis", "norm=layernorm,dytt"), "dytt"),
    "the same axis twice": ((*NORMS, "--axis", "norm=derf"), "twice"),
    "the same value twice": (("--axis", "norm=dyt,dyt"), "twice"),
    "an axis without values": (("--axis", "norm"), "NAME=VALUE"),
    "no seeds": ((*NORMS, "--seeds", "0"), "--seeds 0"),
    "no seeds of the demo": (("--seeds", "0"), "--seeds 0"),
    "a tuned axis": ((*NORMS, "--tune", "norm=dyt,derf"), "--tune norm"),
    "a grid of one value": ((*NORMS, "--tune", "lr=1e-3"), "--tune lr"),
    "an option to tune that does not exist": ((*NORMS, "--tune", "lrr=1,2"), "'lr'"),
    "tuned epochs without a grid": ((*NORMS, "--tune-epochs", "3"), "--tune-epochs"),
    "an arm that contradicts itself": (("--arm", "odd: norm=layernorm,norm_init=ones"), "arm 'odd'"),
    "an arm that contradicts the others' flags": (("--axis", "heads=2,3"), "arm 'heads=3'"),
    "a tuned value that contradicts its arm": ((*NORMS, "--tune", "opt=adamw,nope"), "nope"),
    "an arm that gives an option twice": (("--arm", "a: norm=dyt,norm=derf"), "'a': gives an option twice"),
    "arms of one name": (("--arm", "a: norm=dyt", "--arm", "a: norm=derf"), "'a': given twice"),
    "two arms that are one run": (("--arm", "a: norm=dyt", "--arm", "b: norm=dyt"), "the same run as 'a'"),
    "a shard below the first": ((*NORMS, "--shard", "0/3"), "--shard '0/3'"),
    "a shard beyond the last": ((*NORMS, "--shard", "4/3"), "--shard '4/3'"),
    "a budget that is not a time": ((*NORMS, "--budget", "soon"), "--budget 'soon'"),
    "a budget of nothing": ((*NORMS, "--budget", "0s"), "--budget '0s'"),
    "a preset that does not exist": (("--preset", "normz"), "'norms'"),
    "a plan that is not there": (("--plan", "none.toml"), "none.toml"),
    "a baseline that is not an arm": ((*NORMS, "--baseline", "norm=derf"), "--baseline"),
    "a seed": ((*NORMS, "--seed", "3"), "--seeds"),
    "runs that may not resume": ((*NORMS, "--resume", "never"), "--resume"),
    "fewer than no workers": ((*NORMS, "--jobs", "-1"), "--jobs"),
    "no margin": ((*NORMS, "--smallest-difference", "0"), "--smallest-difference"),
    "data that is not there": (("nowhere.npz", *NORMS), "nowhere.npz"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_command_is_one_line_and_writes_nothing(comparisons, capsys, case):
    words, said = BAD[case]
    assert comparisons.run(*words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not comparisons.root.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[axis]\nnorm = ["dyt"]', "'axes'"),
        ('[axes]\nnrom = ["dyt"]', "'norm'"),
        ('[axes]\nnorm = "dyt"', "list of values"),
        ('seeds = "five"\n[axes]\nnorm = ["dyt"]', "seeds is a whole number"),
        ('version = 9\n[axes]\nnorm = ["dyt"]', "version is 9"),
        ("seeds = ", "not readable as TOML"),
    ],
)
def test_a_plan_file_with_a_mistake_is_one_line(comparisons, capsys, tmp_path, text, said):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    assert comparisons.run("--plan", str(path)) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not comparisons.root.exists()


def test_a_folder_of_a_run_is_left_as_it_is(comparisons, capsys):
    comparisons.folder().mkdir(parents=True)
    (comparisons.folder() / "config.toml").write_text("")
    assert comparisons.run(*NORMS) == 2
    assert "holds a run, not a comparison" in capsys.readouterr().err
    assert [path.name for path in comparisons.folder().iterdir()] == ["config.toml"]


def test_a_folder_that_cannot_be_written_is_one_line(comparisons, capsys):
    comparisons.root.mkdir()
    comparisons.folder().write_text("a file, not a folder")
    assert comparisons.run(*NORMS) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(comparisons, capsys):
    words = ("--preset", "scaler", "--tune-epochs", "1", "--dry-run", "--no-pilot")
    assert comparisons.run(*words) == 0
    said = capsys.readouterr().out
    assert "3 arms x 5 seeds = 15 runs" in said
    assert "first 3 x 4 trials of lr" in said
    assert "smallest difference" in said
    assert not comparisons.root.exists()
