"""The verdict on a start is what the losses of real steps say; a finding beside it names its number and block."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fathoms import ViT, ViTConfig
from fathoms.probes.coordinates import take_first_steps
from fathoms.probes.signal import FirstSteps, probe
from fathoms.probes.thresholds import THRESHOLDS, depth_features
from fathoms.probes.verdict import drift_verdict, outcome_of, site_findings

SITE = {"block": "blocks.0", "branch": "attn", "ratio": 0.2, "largest": 3.0, "logit": 1.0, "entropy": 0.9}
PRE = {"norm": "layernorm", "attn_placement": "pre", "mlp_placement": "pre", "qk_norm": "none"}
PRE |= {"residual": "none", "residual_init": None}


def noisy(mean, spread=0.01, first=2.31):
    return [first, *[mean + spread * (-1) ** i for i in range(10)]]


@pytest.mark.parametrize(
    ("losses", "outcome"),
    [
        (noisy(2.2), "trains"),
        (noisy(2.2, spread=0.2), "not judged"),
        (noisy(2.3), "not judged"),
        (noisy(2.4), "diverges"),
        (noisy(2.4, first=2.9), "not judged"),
        (noisy(2.4, spread=0.5), "not judged"),
        ([*noisy(2.2), math.inf], "diverges"),
        ([2.31, math.nan], "diverges"),
        ([1.0] * 9, "not judged"),
    ],
)
def test_the_last_ten_losses_decide_beside_the_loss_of_a_guess(losses, outcome):
    assert outcome_of(losses, 2.3) == outcome


def test_only_the_last_ten_losses_are_looked_at():
    assert outcome_of([9.0] * 40 + noisy(2.2)[1:], 2.3) == "trains"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"ratio": 1e-7}, "silent branches", "1 of 1 branches is silent"),
        ({"ratio": 0.9}, "stream overwritten", "a branch adds x0.9 of the stream at blocks.0 attn"),
        ({"token_cosine": 0.999}, "tokens alike", "the tokens of an image are alike at blocks.0 attn"),
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
def test_each_number_beyond_its_limit_makes_its_finding(change, kind, words):
    (finding,) = site_findings([{**SITE, **change}], None, "after 50 steps ")
    assert finding.kind == kind
    assert finding.text.startswith(f"after 50 steps {words}")
    assert finding.helps
    assert site_findings([SITE], None) == []


def test_a_finding_names_the_block_that_has_its_number():
    sites = [
        {**SITE, "block": f"blocks.{i}", "logit": 200.0 + i, "entropy": 0.05 - 0.01 * i} for i in range(3)
    ]
    entropy, logits = site_findings(sites, None)
    assert logits.text == "attention logits reach 202 at blocks.2 attn"
    assert entropy.text.startswith("attention is saturated at blocks.2 attn (entropy 0.03 ")
    (finding,) = site_findings([{**SITE, "entropy": -0.0}], None)
    assert "(entropy 0 of its maximum)" in finding.text


def help_for(config, **change):
    return site_findings([{**SITE, **change}], config)[0].helps


def test_advice_leaves_out_what_the_model_has_already():
    assert "--norm layernorm" in help_for({**PRE, "norm": "none"}, ratio=0.9)
    assert (
        help_for(PRE, ratio=0.9)
        == "a lower --lr, or a residual scale that starts small (--residual layerscale)"
    )
    assert help_for({**PRE, "residual": "rezero"}, ratio=0.9) == "a lower --lr"
    assert "a smaller --residual-init" in help_for(
        {**PRE, "residual": "rezero", "residual_init": 1.0}, ratio=0.9
    )
    assert "pre-norm" in help_for({**PRE, "mlp_placement": "post"}, ratio=0.9)
    assert help_for(PRE, logit=340.0) == "--qk-norm rmsnorm, or a lower --lr"
    assert help_for({**PRE, "qk_norm": "rmsnorm"}, logit=340.0) == "a lower --lr"
    assert help_for(None, logit=340.0).startswith("a norm on queries and keys"), "no flag of fathoms' models"


def test_branches_that_are_meant_to_be_silent_are_not_told():
    quiet = [{**SITE, "ratio": 1e-7}]
    assert site_findings(quiet, {**PRE, "residual": "fixup"}) == []
    assert site_findings([{**quiet[0], "gamma_mean": 1e-6}], None) == []


def factor_of(gradients):
    sites = [{**SITE, "block": f"blocks.{i}", "stream": 1.0, "gradient": g} for i, g in enumerate(gradients)]
    return depth_features(sites)["gradient_factor"]


def test_a_gradient_explodes_by_a_growth_that_goes_on_and_not_by_one_jump():
    assert factor_of([100.0, *[1.0] * 11]) == pytest.approx(1.0)
    assert factor_of([1.5**i for i in range(12, 0, -1)]) == pytest.approx(1.5)
    assert factor_of([0.6**i for i in range(12, 0, -1)]) == pytest.approx(0.6)


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
        ({"logit": [5.0, 20.0, 40.0, 60.0, 80.0, 95.0]}, "attention logits"),
        ({"entropy": [0.9, 0.7, 0.5, 0.35, 0.2, 0.12]}, "attention saturated"),
        ({"token_cosine": [0.3, 0.5, 0.6, 0.7, 0.8, 0.9]}, "tokens alike"),
        ({"saturated": [0.0, 0.1, 0.2, 0.3, 0.4, 0.45]}, "curve saturated"),
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


def signal_of(**options):
    torch.manual_seed(0)
    config = ViTConfig(image_size=8, patch_size=2, in_channels=1, dim=16, heads=2, depth=6, num_classes=4)
    vit = ViT(config.replace(**options))
    images, labels = torch.randn(64, 1, 8, 8), torch.arange(64) % 4
    return vit, probe(vit, images[:8], labels[:8]), images, labels


def kinds_of_start(gradients, **config):
    """Findings on the depth of a signal whose gradients these are."""
    _, signal, _, _ = signal_of(depth=len(gradients), **config)
    signal[:] = [replace(site, gradient=gradients[i // 2]) for i, site in enumerate(signal)]
    return [finding.kind for finding in signal.verdict().findings]


def test_gradients_over_the_depth_are_told_of_stacks_that_are_deep_enough():
    assert kinds_of_start([2.0**-i for i in range(6)]) == ["gradient explodes"]
    assert kinds_of_start([2.0**i for i in range(6)]) == ["gradient vanishes"]
    assert kinds_of_start([2.0**-i for i in range(5)]) == []
    assert kinds_of_start([0.0] * 6) == ["no gradient yet"]


def test_the_verdict_of_a_signal_is_that_of_its_first_steps():
    vit, signal, images, labels = signal_of()
    assert str(signal.verdict()).startswith(
        "Start: not judged (from the initialisation alone, which misleads)"
    )
    steps = take_first_steps(vit, images, labels, batch_size=8, steps=12)
    assert (len(steps.losses), steps.guess) == (12, pytest.approx(math.log(4)))
    good = signal.verdict(replace(steps, losses=[1.5, *[1.2] * 10]))
    assert good.outcome == "trains"
    assert "adamw at lr 0.001, 11 steps, loss 1.5 -> 1.2, a guess has 1.39" in str(good)
    assert signal.verdict(replace(steps, losses=[1.5, *[1.3863] * 10])).outcome == "not judged"
    assert signal.verdict(replace(steps, after=None)).outcome == "diverges"
    wild = take_first_steps(vit, images, labels, batch_size=8, lr=30.0, steps=12)
    assert signal.verdict(wild).outcome == "diverges"


def test_a_guess_knows_the_shares_of_the_classes():
    vit, _, images, _ = signal_of()
    labels = torch.tensor([0] * 48 + [1] * 16)
    shares = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert take_first_steps(vit, images, labels, batch_size=8, steps=1).guess == pytest.approx(shares)


def test_no_step_begins_after_the_time_is_over():
    vit, _, images, labels = signal_of()
    assert len(take_first_steps(vit, images, labels, steps=50, seconds=0.0).losses) == 1


def test_a_loss_that_is_not_finite_diverges_though_the_weights_stayed_finite():
    _, signal, _, _ = signal_of()
    assert signal.verdict(FirstSteps([2.0, math.inf], signal, 1.39)).outcome == "diverges"


def test_a_signal_prints_as_a_table():
    _, signal, _, _ = signal_of()
    assert len(str(signal).splitlines()) == 2 + len(signal)
    assert "token_cosine" in str(signal).splitlines()[1]
