"""Each finding is made of the number that it names, and of no other."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fathoms import ViT, ViTConfig
from fathoms.probes import thresholds
from fathoms.probes.coordinates import FirstSteps, take_first_steps
from fathoms.probes.signal import probe
from fathoms.probes.thresholds import PRECISION, THRESHOLDS, depth_features, start_features
from fathoms.probes.verdict import Basis, drift_verdict, start_verdict

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
        ({"gradient_factor": 1.9}, "not judged", "gradient explodes"),
        ({"gradient_factor": 0.4}, "not judged", "gradient vanishes"),
        ({"loss_rise": 2.0}, "diverges", "loss rises"),
        ({"nonfinite": 1.0, "loss_rise": None}, "diverges", "not finite"),
        ({"stream_max_rise": 400.0}, "trains", "stream rises"),
        ({"after_ratio_max": 0.9}, "not judged", "stream overwritten"),
        ({"after_token_cosine": 0.999}, "not judged", "tokens alike"),
        ({"growth_power": 3.0}, "trains", "stream grows"),
        ({"gradient_last": 0.0, "gradient_factor": None}, "trains", "no gradient yet"),
    ],
)
def test_each_number_beyond_its_limit_makes_its_finding(change, outcome, kind):
    verdict = start_verdict({**HEALTHY, **change}, [SITE])
    assert verdict.outcome == outcome
    assert [finding.kind for finding in verdict.findings] == [kind]
    assert verdict.findings[0].bad == (outcome != "trains")
    assert verdict.findings[0].helps


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"ratio": 1e-7}, "silent branches", "1 of 1 branches is silent"),
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


@pytest.mark.parametrize("change", [{"ratio": 1e-7}, {"logit": 340.0}, {"entropy": 0.01}], ids=str)
def test_what_is_told_of_branches_after_the_steps_says_so(change):
    given, stepped = (
        start_verdict(HEALTHY, [{**SITE, **change}], basis=Basis(sites_after=after)).findings[0].text
        for after in (0, 10)
    )
    assert stepped == f"after 10 steps {given}"


def stack(gradients):
    return [{**SITE, "block": f"blocks.{i}", "stream": 1.0, "gradient": g} for i, g in enumerate(gradients)]


def outcome_of(gradients):
    return outcome({**HEALTHY, **depth_features(stack(gradients))})


def outcome(features):
    return start_verdict(features, [SITE]).outcome


def test_a_gradient_explodes_by_a_growth_that_goes_on_and_not_by_one_jump():
    assert outcome_of([100.0, *[1.0] * 11]) == "trains"
    assert outcome_of([1.5**i for i in range(12, 0, -1)]) == "not judged"
    assert outcome_of([0.6**i for i in range(12, 0, -1)]) == "not judged"


def test_a_shallow_stack_is_not_judged_by_the_difference_of_its_blocks():
    assert outcome_of([3.0, 1.5, 1.0]) == "trains"
    assert outcome({**HEALTHY, "blocks": 3.0, "after_ratio_max": 0.9}) == "trains"
    assert outcome({**HEALTHY, "blocks": 6.0, "after_ratio_max": 0.9}) == "not judged"


def test_a_verdict_says_whether_a_calibrated_limit_decided_it():
    steps = {**HEALTHY, "after_ratio_max": 0.2}
    assert start_verdict(steps, [SITE]).calibrated
    assert start_verdict({**steps, "loss_rise": 2.0}, [SITE]).calibrated
    assert not start_verdict({**steps, "gradient_factor": 1.9}, [SITE]).calibrated
    assert not start_verdict({**steps, "gradient_factor": 0.4}, [SITE]).calibrated
    assert not start_verdict({**steps, "blocks": 3.0}, [SITE]).calibrated


PRE = {"norm": "layernorm", "attn_placement": "pre", "mlp_placement": "pre", "qk_norm": "none"}
PRE |= {"residual": "none", "residual_init": None}


def help_for(change, config, site=SITE):
    return start_verdict({**HEALTHY, **change}, [site], basis=Basis(config=config)).findings[0].helps


def test_advice_leaves_out_what_the_model_has_already():
    explodes, logits = {"gradient_factor": 1.9}, {**SITE, "logit": 340.0}
    assert help_for(explodes, {**PRE, "norm": "none"}).startswith("--norm layernorm")
    assert "norm" not in help_for(explodes, PRE)
    assert "residual" not in help_for(explodes, {**PRE, "residual": "rezero"})
    assert (
        help_for(explodes, {**PRE, "residual": "rezero", "residual_init": 1.0}) == "a smaller --residual-init"
    )
    assert help_for({}, PRE, logits) == "--qk-norm rmsnorm"
    assert help_for({}, {**PRE, "qk_norm": "rmsnorm"}, logits) == "a lower --lr"


def test_advice_on_a_model_that_is_not_fathoms_names_no_flag_of_its_models():
    assert help_for({}, None, {**SITE, "logit": 340.0}) == "a norm on queries and keys"
    assert "--residual" not in help_for({"loss_rise": 2.0}, None)


def test_a_finding_names_the_block_that_has_its_number():
    sites = [
        {**SITE, "block": f"blocks.{i}", "logit": 200.0 + i, "entropy": 0.05 - 0.01 * i} for i in range(3)
    ]
    logits, entropy = start_verdict(HEALTHY, sites).findings
    assert logits.text == "attention logits reach 202 at blocks.2 attn"
    assert entropy.text.startswith("attention is saturated at blocks.2 attn (entropy 0.03 ")


def test_an_entropy_of_minus_zero_is_written_as_zero():
    (finding,) = start_verdict(HEALTHY, [{**SITE, "entropy": -0.0}]).findings
    assert "(entropy 0 of its maximum)" in finding.text


@pytest.mark.parametrize(("steps", "words"), [(1, "within 1 step "), (3, "within 3 steps ")])
def test_the_words_name_the_number_of_steps_that_were_taken(steps, words):
    (finding,) = start_verdict({**HEALTHY, "loss_rise": 2.0}, [SITE], basis=Basis(steps)).findings
    assert words in finding.text


def test_steps_of_few_images_are_not_judged_unless_they_are_not_finite():
    noisy = {**HEALTHY, "loss_rise": 2.0, "after_ratio_max": 0.9}
    verdict = start_verdict(noisy, [SITE], basis=Basis(images=1))
    assert (verdict.outcome, kinds(verdict)) == ("not judged", ["few images"])
    assert "steps of 1 image " in verdict.findings[0].text
    assert start_verdict(noisy, [SITE], basis=Basis(images=8)).outcome == "diverges"
    assert start_verdict({**noisy, "nonfinite": 1.0}, [SITE], basis=Basis(images=1)).outcome == "diverges"
    initial = {name: HEALTHY[name] for name in ("gradient_factor", "gradient_last")}
    assert start_verdict(initial, [SITE]).outcome == "not judged", "nothing was trained"


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


def test_drift_does_not_advise_a_norm_on_queries_and_keys_that_is_there():
    grows = rows(logit=[5.0, 20.0, 40.0, 60.0, 80.0, 95.0])
    assert "--qk-norm rmsnorm" in drift_verdict(grows, config=PRE).findings[0].helps
    assert "qk-norm" not in drift_verdict(grows, config={**PRE, "qk_norm": "rmsnorm"}).findings[0].helps


def test_a_scale_that_changes_its_sign_does_not_die():
    assert drift_verdict(rows(gamma_mean=[0.1, 0.05, 0.02, 0.0, 0.03, 0.06])).outcome == "steady"


def test_the_words_on_a_trend_say_where_it_began_where_it_is_and_when_it_arrives():
    (finding,) = drift_verdict(rows(logit=[20.0, 35.0, 50.0, 65.0, 80.0])).findings
    assert "20 at the start, 80 at update 500 (blocks.0 attn)" in finding.text
    assert f"{THRESHOLDS.logit:g} in 133 updates at this pace" in finding.text


def test_the_share_of_verdicts_that_came_true_is_the_one_that_was_measured():
    measured = json.loads((ROOT / "results" / "probe_calibration.json").read_text())["summary"]["verdicts"]
    shares = {row["verdict"]: round(row["precision"], 2) for row in measured}
    assert shares.pop("stalls") < 0.5, "so it is no verdict"
    assert shares == PRECISION


def signal_of(**options):
    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=2, in_channels=1, dim=16, heads=2, depth=6, num_classes=4)
    vit = ViT(config.replace(**options))
    images, labels = torch.randn(64, 1, 8, 8), torch.arange(64) % 4
    return vit, probe(vit, images[:8], labels[:8]), images, labels


def test_the_verdict_of_a_signal_is_that_of_its_first_steps(monkeypatch):
    vit, signal, images, labels = signal_of()
    assert str(signal.verdict()).startswith(
        "Start: not judged (from the initialisation alone, which misleads)"
    )
    steps = replace(take_first_steps(vit, images, labels, batch_size=8), losses=[1.5, 1.2])
    good = signal.verdict(steps)
    assert (good.outcome, good.came_true) == ("trains", None)
    assert "adamw at lr 0.001, 2 steps, loss 1.5 -> 1.2; outside what was calibrated, CIFAR-10 at 24" in str(
        good
    )
    guess = signal.verdict(replace(steps, losses=[1.5, 1.38]))
    assert guess.outcome == "not judged"
    assert "the loss is that of a guess, ln(4)" in str(guess)
    wild = take_first_steps(vit, images, labels, batch_size=8, lr=30.0)
    assert signal.verdict(wild).outcome == "diverges"
    monkeypatch.setattr(thresholds, "CALIBRATED_BLOCKS", (6,))
    alike = replace(steps, seen=(3, 32, 32), classes=10)
    assert signal.verdict(alike).came_true == PRECISION["trains"]
    assert "91% of such verdicts came true on CIFAR-10 at 24 and 48 blocks" in str(signal.verdict(alike))
    for other in ({"steps": 3}, {"opt": "sgd"}, {"classes": 9}, {"seen": (1, 32, 32)}):
        assert signal.verdict(replace(alike, **other)).came_true is None


def test_a_signal_prints_as_a_table():
    _, signal, _, _ = signal_of()
    assert len(str(signal).splitlines()) == 2 + len(signal)
    assert "token_cosine" in str(signal).splitlines()[1]


def test_a_loss_that_is_not_finite_diverges_though_the_weights_stayed_finite():
    _, signal, _, _ = signal_of()
    steps = FirstSteps([2.0, math.inf], [1.0], after=signal, batch_size=8)
    assert start_features(signal, signal, steps.losses)["nonfinite"] == 1.0
    assert signal.verdict(steps).outcome == "diverges"
