"""Each finding is made of the number that it names, and of no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathoms.probes.drift import drift_verdict
from fathoms.probes.thresholds import PRECISION, THRESHOLDS
from fathoms.probes.verdict import start_outcome, start_verdict

ROOT = Path(__file__).parents[2]

SITE = {"block": "blocks.0", "branch": "attn", "ratio": 0.2, "largest": 3.0, "logit": 1.0, "entropy": 0.9}
HEALTHY = {"gradient_factor": 1.02, "gradient_last": 0.1, "loss_rise": 0.0, "stream_max_rise": 1.5}
HEALTHY |= {"after_token_cosine": 0.4, "growth_power": 0.5, "nonfinite": 0.0}


def test_a_healthy_start_has_no_findings():
    verdict = start_verdict(HEALTHY, [SITE])
    assert (verdict.outcome, verdict.findings) == ("trains", [])


@pytest.mark.parametrize(
    ("change", "outcome", "kind"),
    [
        ({"gradient_factor": 1.9}, "diverges", "gradient explodes"),
        ({"gradient_factor": 0.4}, "stalls", "gradient vanishes"),
        ({"loss_rise": 2.0}, "diverges", "loss rises"),
        ({"nonfinite": 1.0, "loss_rise": None}, "diverges", "not finite"),
        ({"stream_max_rise": 400.0}, "trains", "stream rises"),
        ({"after_ratio_max": 0.9}, "stalls", "stream overwritten"),
        ({"after_token_cosine": 0.999}, "stalls", "tokens alike"),
        ({"growth_power": 3.0}, "trains", "stream grows"),
        ({"gradient_last": 0.0, "gradient_factor": None}, "trains", "no gradient yet"),
    ],
)
def test_each_number_beyond_its_limit_makes_its_finding(change, outcome, kind):
    verdict = start_verdict({**HEALTHY, **change}, [SITE])
    assert verdict.outcome == outcome == start_outcome({**HEALTHY, **change})
    assert [finding.kind for finding in verdict.findings] == [kind]
    assert verdict.findings[0].bad == (outcome != "trains")
    assert verdict.findings[0].helps


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"ratio": 1e-7}, "silent branches", "1 of 1 branches are silent"),
        (
            {"largest": 1e5},
            "float16 overflows",
            "float16 would overflow at blocks.0 attn (largest value 1e+05)",
        ),
        ({"logit": 340.0}, "attention logits", "attention logits reach 340 at blocks.0 attn"),
        ({"entropy": 0.01}, "attention saturated", "attention is saturated at blocks.0 attn"),
        ({"saturated": 0.8}, "curve saturated", "80% of the values are on the flat parts of the curve"),
        ({"dead": 0.9}, "dead units", "90% of the hidden units are dead"),
    ],
)
def test_what_is_told_beside_the_verdict_names_its_block(change, kind, words):
    verdict = start_verdict(HEALTHY, [{**SITE, **change}])
    assert (verdict.outcome, [finding.kind for finding in verdict.findings]) == ("trains", [kind])
    assert words in verdict.findings[0].text


def rows(**series):
    count = len(next(iter(series.values())))
    return [
        {"step": 100 * (i + 1), "sites": [{**SITE, **{name: values[i] for name, values in series.items()}}]}
        for i in range(count)
    ]


def kinds(verdict):
    return [finding.kind for finding in verdict.findings]


def test_a_steady_run_is_steady_and_a_short_one_is_not_judged():
    assert drift_verdict(rows(logit=[1.0, 1.1, 1.0, 1.1, 1.0])).outcome == "steady"
    assert drift_verdict(rows(logit=[1.0, 1.1])) is None


@pytest.mark.parametrize(
    ("series", "kind"),
    [
        ({"logit": [5.0, 20.0, 40.0, 60.0, 80.0, 95.0]}, "logits grow"),
        ({"entropy": [0.9, 0.7, 0.5, 0.35, 0.2, 0.12]}, "entropy collapses"),
        ({"token_cosine": [0.3, 0.5, 0.6, 0.7, 0.8, 0.9]}, "tokens alike"),
        ({"saturated": [0.0, 0.1, 0.2, 0.3, 0.4, 0.45]}, "curve saturates"),
        ({"gamma_mean": [0.1, 0.09, 0.04, 0.009, 0.005, 0.001]}, "gamma dies"),
        ({"update": [1e-3, 1e-3, 1e-3, 1e-3, 1e-3, 0.5]}, "update size"),
    ],
)
def test_a_trend_towards_its_limit_is_told_before_it_is_there(series, kind):
    verdict = drift_verdict(rows(**series))
    assert verdict.outcome == "drifts"
    assert kind in kinds(verdict)


def test_a_scale_that_changes_its_sign_does_not_die():
    assert drift_verdict(rows(gamma_mean=[0.1, 0.05, 0.02, 0.0, 0.03, 0.06])).outcome == "steady"


def test_the_words_on_a_trend_say_where_it_began_where_it_is_and_when_it_arrives():
    (finding,) = drift_verdict(rows(logit=[20.0, 35.0, 50.0, 65.0, 80.0])).findings
    assert "20 at the start, 80 at update 500 (blocks.0 attn)" in finding.text
    assert f"{THRESHOLDS.logit:g} in 133 updates at this pace" in finding.text


def test_the_share_of_verdicts_that_came_true_is_the_one_that_was_measured():
    measured = json.loads((ROOT / "results" / "probe_calibration.json").read_text())["summary"]["verdicts"]
    assert {row["verdict"]: round(row["precision"], 2) for row in measured} == PRECISION
