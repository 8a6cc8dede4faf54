"""Scores of runs trained elsewhere: scipy's and statsmodels' numbers, and one line for each mistake in them."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from fathoms.cli.main import main
from fathoms.comparing.scores import judge
from fathoms.errors import ConfigError, FathomsError

RNG = np.random.default_rng(7)
SETS = [
    {
        f"arm{arm}": RNG.normal(50 + step * arm, spread * (1 + arm * uneven), seeds).tolist()
        for arm in range(arms)
    }
    for arms, seeds, step, spread, uneven in [
        (2, 3, 0, 1, 0),
        (2, 5, 2, 1, 0),
        (2, 10, 0.5, 1, 3),
        (3, 3, 1, 0.5, 1),
        (3, 5, 3, 1, 0),
        (4, 4, 1, 1, 0.5),
        (5, 5, 0, 2, 0),
        (5, 10, 0.7, 1, 0.2),
        (6, 3, 2, 1, 0),
        (3, 20, 0.3, 1, 1),
    ]
]


@pytest.mark.parametrize("scores", SETS, ids=range(len(SETS)))
def test_pairs_have_welchs_p_corrected_by_holm_or_a_little_more_caution(scores):
    """Fewer degrees of freedom, and a floor under each variance: never surer than Welch, and nearly as sure."""
    found = judge(scores, smallest_difference=1e-6)
    pairs = list(itertools.combinations(scores, 2))
    ps = [stats.ttest_ind(scores[a], scores[b], equal_var=False).pvalue for a, b in pairs]
    rejected, adjusted, _, _ = multipletests(ps, 0.05, "holm")
    assert [(verdict.a, verdict.b) for verdict in found.verdicts] == pairs
    for verdict, (a, b), p, sure in zip(found.verdicts, pairs, adjusted, rejected, strict=True):
        assert verdict.difference == pytest.approx(np.mean(scores[a]) - np.mean(scores[b]))
        assert verdict.p >= p * (1 - 1e-9)
        assert sure or not verdict.verdict.endswith("better")
        side = stats.ttest_ind(scores[a], scores[b], equal_var=False).confidence_interval(1 - verdict.level)
        assert verdict.low <= side.low + 1e-9
        assert verdict.high >= side.high - 1e-9
        if verdict.n >= 10 and np.var(scores[a]) < 3 * np.var(scores[b]) < 9 * np.var(scores[a]):
            assert verdict.p == pytest.approx(p, rel=0.25, abs=1e-3)


def test_paired_scores_have_the_paired_test():
    scores = {"a": [1.0, 2.0, 3.1, 4.2], "b": [1.5, 2.4, 3.8, 4.6]}
    (verdict,) = judge(scores, paired=True).verdicts
    assert verdict.p == pytest.approx(stats.ttest_rel(scores["a"], scores["b"]).pvalue)


def test_equal_arms_within_the_margin_are_no_different():
    rng = np.random.default_rng(1)
    (verdict,) = judge(
        {"a": rng.normal(5, 0.1, 8).tolist(), "b": rng.normal(5, 0.1, 8).tolist()}, smallest_difference=1.0
    ).verdicts
    assert verdict.verdict == "no difference"


def test_the_best_of_a_loss_is_the_lowest_and_nobody_wins_among_equals():
    losses = {"a": [1.0, 1.1, 0.9], "b": [2.0, 2.1, 1.9]}
    assert judge(losses, higher_is_better=False).best == "a"
    assert judge(losses).best == "b"
    assert judge({"a": [1.0, 1.2, 0.9], "b": [1.1, 0.9, 1.0]}).best is None


def test_rows_frames_and_files_are_the_same_scores(tmp_path):
    scores = {"a": [1.0, 1.5, 1.2], "b": [2.0, 2.5, 2.2]}
    rows = [
        {"arm": arm, "seed": seed, "score": value}
        for arm, own in scores.items()
        for seed, value in enumerate(own)
    ]
    lines = ["Arm,Seed,Score", *(f"{row['arm']},{row['seed']},{row['score']}" for row in rows)]
    (tmp_path / "s.csv").write_text("\n".join(lines))
    expected = judge(scores).to_json()
    assert judge(rows).to_json() == judge(tmp_path / "s.csv").to_json() == expected
    assert judge([tuple(row.values()) for row in rows]).to_json() == expected
    pandas = pytest.importorskip("pandas")
    assert judge(pandas.DataFrame(rows)).to_json() == expected


def test_runs_that_did_not_end_well_are_counted_not_averaged():
    rows = [("a", 0, 1.0), ("a", 1, math.nan), ("a", 2, 1.2), ("a", 3, 1.1), ("a", 4, None, "failed")]
    rows += [("b", seed, 1.0 + seed / 10, "done") for seed in range(4)]
    found = judge(rows)
    arm = found.arms[0]
    assert (arm.values, arm.diverged, arm.failed) == ((1.0, 1.2, 1.1), (1,), (4,))
    assert "1 diverged, 1 failed" in found.table()
    assert "diverged" in found.answer or "diverged" in found.verdicts[0].sentence


def test_too_few_seeds_have_no_verdict():
    (verdict,) = judge({"a": [1.0, 2.0], "b": [3.0, 4.0, 5.0]}).verdicts
    assert verdict.verdict == "too few seeds"


def test_ten_thousand_rows_are_judged_and_shown():
    rows = [(f"arm{run % 10}", run // 10, float(value)) for run, value in enumerate(RNG.normal(size=10_000))]
    found = judge(rows, baseline="arm0")
    assert len(found.verdicts) == 9
    assert len(found.table().splitlines()) == 21
    assert found.plot().axes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'arm'"),
        ("arm,seed,score\n", "there are no runs"),
        ("arm,seed\na,1\n", "has no column 'score'; the columns are arm, seed, score, status"),
        ("arm,seed,score\na,x,1\n", "seed 'x' is not a whole number from 0"),
        ("arm,seed,score\na,1.5,1\n", "seed '1.5' is not a whole number from 0"),
        ("arm,seed,score\na,1,good\n", "score 'good' is not a number"),
        ("arm,seed,score\na,1,1e308\na,2,-1e308\n", "score '1e308' is beyond 1e+60"),
        ("arm,seed,score\na,1,1e80\na,2,-1e99\n", "score '1e80' is beyond 1e+60"),
        ("arm,seed,score\na,1,1e-80\na,2,1\n", "score '1e-80' is below 1e-60"),
        ("arm,seed,score,Score\na,1,1,2\n", "column 'score' is there twice"),
        ("arm,seed,score\na,1,1\na,2,1,5\n", "line 3 has 4 cells for 3 columns"),
        ("arm,seed,score,status\n\na,1,1\n", "line 3 has 3 cells for 4 columns"),
        ("arm,seed,score\n ,1,1\n", "'' is no name of an arm"),
        ("arm,seed,score\n" + "a" * 200_000 + ",1,1\n", "field larger than field limit"),
        ('arm,seed,score\n"a,1,1\n', "unexpected end of data"),
        ("arm,seed,score\na,1,1\na,1,2\n", "seed 1 of 'a' is there twice"),
        ("arm,seed,score,status\na,1,1,dun\n", "did you mean 'done'?"),
        ("arm,seed,score\n\x1b[31m,1,1\n", "is no name of an arm"),
        ("arm,seed,score\n" + "".join(f"a{n},0,1\n" for n in range(300)), "300 arms are more than 200"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path, text, message, capsys):
    path = tmp_path / "scores.csv"
    path.write_text(text)
    with pytest.raises(FathomsError) as error:
        judge(path)
    assert message in str(error.value)
    assert main(["compare", "--scores", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ({"a": 3}, {}, "give a list of scores"),
        (5, {}, "give lists by arm"),
        ([("a", 0)], {}, "give (arm, seed, score)"),
        ({"a": [1.0]}, {"baseline": "b"}, "no arm is called 'b'"),
        ({"a": [1.0]}, {"smallest_difference": 0}, "give a number above 0"),
        ({"a": [1.0]}, {"smallest_difference": "0.5"}, "smallest_difference='0.5': give a number above 0"),
        ({"a": [1.0]}, {"smallest_difference": math.nan}, "give a number above 0"),
        ({"a": [1.0]}, {"smallest_difference": 10**400}, "give a number above 0"),
        ({"a": [10**400]}, {}, "is not a number"),
        ({"a": {1.0, 2.0}}, {}, "give a list of scores"),
        ({"a": {"first": 1.0}}, {}, "seed 'first' is not a whole number"),
        ({None: [1.0]}, {}, "None is no name of an arm"),
        ([(math.nan, 0, 1.0)], {}, "nan is no name of an arm"),
        ([("a", 0, 1.0, "RUNNING")], {}, "no status is called 'running'"),
    ],
)
@pytest.mark.plain
def test_a_mistake_in_python_is_one_line(scores, options, message):
    with pytest.raises(FathomsError, match=r"^[^\n]*$") as error:
        judge(scores, **options)
    assert message in str(error.value)


def test_scores_by_seed_keep_their_seeds():
    found = judge({"a": {0: 71.2, 5: 71.9, 2: 70.8}, "b": {"0": 64.0, "2": 65.0, "5": 66.0}}, paired=True)
    assert found.arms[0].scores == ((0, 71.2), (2, 70.8), (5, 71.9))
    assert found.verdicts[0].correlation == pytest.approx(np.corrcoef([71.2, 70.8, 71.9], [64, 65, 66])[0, 1])


def test_scores_up_to_the_limits_are_judged_like_others():
    scores = {"a": [1.0, 1.1, 1.2, 1.3], "b": [2.0, 2.1, 2.2, 2.25], "c": [2.0, 2.1, 2.3, 2.2]}
    expected = [verdict.p for verdict in judge(scores).verdicts]
    for scale in (4e59, 1e-59):
        scaled = judge({arm: [scale * value for value in own] for arm, own in scores.items()})
        assert [verdict.p for verdict in scaled.verdicts] == pytest.approx(expected)
        assert json.dumps(scaled.to_json(), allow_nan=False)


@pytest.mark.parametrize("margin", [None, 0.5])
def test_small_differences_are_shown_with_their_digits(margin):
    scores = {"a": [1e-12, 1.1e-12, 1.2e-12], "b": [7e-12, 7.1e-12, 7.3e-12]}
    found = judge(scores, smallest_difference=margin)
    assert found.best == "b"
    assert "0.0000000000060" in found.verdicts[0].sentence
    assert "0.0000000000011" in found.table()
    # Pairs differ by far less than seeds do.
    gaps = judge({"a": [1.0, 2.0, 3.0], "b": [1.0001, 2.0001002, 3.0001001]}, paired=True)
    assert "b is better than a by 0.0001001" in gaps.verdicts[0].sentence


@pytest.mark.plain
def test_frames_with_missing_values_and_words_of_trackers():
    pandas = pytest.importorskip("pandas")
    # As mlflow.search_runs gives them: everything that was logged, parameters as text.
    frame = pandas.DataFrame(
        {
            "run_id": list("pqrstuvw"),
            "status": ["FINISHED"] * 6 + ["KILLED", "FAILED"],
            "metrics.val_acc": [1.0, 1.2, 1.1, 9.0, 9.2, 9.1, math.nan, 5.0],
            "params.seed": list("01201233"),
            "tags.arm": ["a"] * 3 + ["b"] * 3 + ["a", "b"],
        }
    ).rename(columns={"tags.arm": "arm", "params.seed": "seed", "metrics.val_acc": "score"})
    found = judge(frame)
    assert found.best == "b"
    assert [(len(arm.scores), arm.diverged, arm.failed) for arm in found.arms] == [(3, (), (3,))] * 2
    rows = frame.astype(object).to_dict("records")
    assert judge([row | {"status": pandas.NA} for row in rows[:6]]).best == "b"
    for nothing in (None, math.nan, pandas.NA, pandas.NaT, " "):
        with pytest.raises(FathomsError, match=r"^scores: run 1: [^\n]* is no name of an arm"):
            judge([rows[0] | {"arm": nothing}])
        with pytest.raises(FathomsError, match="is no name of an arm"):
            judge(frame.assign(arm=[nothing] * 8))
    frame.columns = ["run_id", "status", "score", "seed", "seed"]
    with pytest.raises(FathomsError, match="scores: column 'seed' is there twice"):
        judge(frame)


def test_lines_may_end_in_cr_and_names_have_blanks_around_them(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_bytes(b"arm , seed,score,status\ra,0, 1\t,Finished\r a,1,2,\ra ,2, ,killed\r")
    (arm,) = judge(path).arms
    assert (arm.name, arm.scores, arm.failed) == ("a", ((0, 1.0), (1, 2.0)), (2,))


@pytest.mark.plain
def test_judgements_are_json(tmp_path, capsys):
    rng = np.random.default_rng(0)
    scores = {arm: rng.normal(mean, 1, 6) for arm, mean in (("a", 0), ("b", 5))} | {"c": np.array([math.nan])}
    for paired in (False, True):
        found = judge(scores, smallest_difference=np.float32(0.5), paired=paired)
        assert json.loads(json.dumps(found.to_json(), allow_nan=False))["margin"] == 0.5
    path = tmp_path / "ok.csv"
    path.write_text("arm,seed,score\n" + "".join(f"a,{s},{s}\nb,{s},{9 + s / 2}\n" for s in range(4)))
    assert main(["compare", "--scores", str(path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(judge(path).to_json()))
    assert printed["answer"].startswith("b wins")


@pytest.mark.parametrize(("metric", "best"), [("top1", "b"), ("loss", "a"), ("seconds-to=90", "a")])
def test_the_metric_says_which_side_is_better(metric, best, tmp_path, capsys):
    path = tmp_path / "scores.csv"
    path.write_text("arm,seed,score\n" + "".join(f"a,{s},{1 + s / 9}\nb,{s},{9 + s / 8}\n" for s in range(4)))
    assert main(["compare", "--scores", str(path), "--metric", metric]) == 0
    assert f"{best} wins" in capsys.readouterr().out
    assert main(["compare", "--scores", str(path), "--metric", "error"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command_prints_the_same_table(tmp_path, capsys):
    path = tmp_path / "scores.csv"
    rows = [f"{arm},{seed},{mean + seed / 10}" for arm, mean in (("a", 1), ("b", 9)) for seed in range(4)]
    path.write_text("\n".join(["arm,seed,score", *rows]))
    assert main(["compare", "--scores", str(path), "--baseline", "a"]) == 0
    assert judge(path, baseline="a").table() in capsys.readouterr().out
    assert main(["compare", "--scores", str(path), "--seeds", "5"]) == 2
    assert "--seeds: nothing is trained with --scores" in capsys.readouterr().err


def test_a_page_shows_the_verdicts_and_the_picture_and_replaces_nothing(tmp_path, capsys):
    path, page = tmp_path / "scores.csv", tmp_path / "scores.html"
    rows = [f"<b>{arm},{seed},{mean + seed / 10}" for arm, mean in (("a", 1), ("b", 9)) for seed in range(4)]
    path.write_text("\n".join(["arm,seed,score", *rows]))
    words = ["compare", "--scores", str(path), "--page", str(page)]
    assert main(words) == 0
    text = page.read_text()
    assert "<svg" in text
    assert "&lt;b&gt;b is better than &lt;b&gt;a by 8.00" in text.replace("<wbr>", "")
    assert "<b>b" not in text
    capsys.readouterr()
    assert main(words) == 2
    assert "is there already; give another name" in capsys.readouterr().err
    assert main(["compare", "--page", str(page)]) == 2
    assert "--page would not be used: it belongs to --scores; leave it out" in capsys.readouterr().err
    # One run that diverged leaves nothing to draw.
    path.write_text("arm,seed,score\na,0,nan\n")
    assert main([*words[:4], str(tmp_path / "none.html")]) == 0
    assert "<svg" not in (tmp_path / "none.html").read_text()


@pytest.mark.plain
def test_scores_of_a_form_that_could_be_misread_are_refused_or_read_by_their_seeds():
    pandas = pytest.importorskip("pandas", reason="needs pip install -e .[dev]")
    a, b = {0: 1.0, 1: 2.0, 2: 3.5}, {2: 3.0, 1: 1.4, 0: 0.6}
    (verdict,) = judge({"a": a, "b": b}, paired=True).verdicts
    (same,) = judge({"a": pandas.Series(a), "b": pandas.Series(b)}, paired=True).verdicts
    assert same.p == verdict.p
    for scores, more, said in (
        ({"a": [1, 2, 3], "b": []}, {}, "'b' has no score"),
        ({"arm": [1, 2], "seed": [0, 1], "score": [3, 4]}, {}, "these are columns"),
        ({"a": [1, 2, 3]}, {"higher_is_better": "no"}, "higher_is_better='no': give True or False"),
        ({"a": [1, 2, 3]}, {"paired": "false"}, "paired='false': give True or False"),
    ):
        with pytest.raises(ConfigError, match=said):
            judge(scores, **more)
