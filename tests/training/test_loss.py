"""Losses and their gradients are timm's, on labels and on soft targets."""

from __future__ import annotations

import pytest
import torch

from fathoms import FathomsError
from fathoms.training.objective import LOSSES, BinaryCrossEntropy, CrossEntropy

CLASSES = 7


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(6, CLASSES, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(CLASSES, (6,), generator=generator)
    soft = torch.rand(6, CLASSES, generator=generator).softmax(1)
    return logits, labels, soft


def assert_same(ours, theirs, targets):
    """Values and gradients to 1e-6: the same sums in another order."""
    logits, _, _ = data()
    twin = logits.detach().clone().requires_grad_()
    value, expected = ours(logits, targets), theirs(twin, targets)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    value.backward()
    expected.backward()
    assert torch.allclose(logits.grad, twin.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_on_labels_is_timms(smoothing):
    timm = pytest.importorskip("timm.loss")
    assert_same(CrossEntropy(smoothing), timm.LabelSmoothingCrossEntropy(smoothing), data()[1])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_on_soft_targets_is_timms_and_smooths_nothing(smoothing):
    timm = pytest.importorskip("timm.loss")
    assert_same(CrossEntropy(smoothing), timm.SoftTargetCrossEntropy(), data()[2])


@pytest.mark.parametrize("over_classes", ["mean", "sum"])
@pytest.mark.parametrize("threshold", [None, 0.0, 0.14])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_bce_is_timms(smoothing, threshold, over_classes, soft):
    timm = pytest.importorskip("timm.loss")
    peer = timm.BinaryCrossEntropy(smoothing, threshold, sum_classes=over_classes == "sum")
    assert_same(BinaryCrossEntropy(smoothing, threshold, over_classes), peer, data()[2 if soft else 1])


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize("soft", [False, True])
def test_low_precision_logits_give_a_float32_loss(name, soft):
    """One bfloat16 rounding of the logits is all that may differ: a percent is ample."""
    logits, labels, mixed = data()
    targets = mixed if soft else labels
    exact = LOSSES.build(name)(logits, targets)
    low = logits.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = LOSSES.build(name)(low, targets)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(exact.item(), rel=0.01)
    value.backward()
    assert low.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(LOSSES))
def test_extreme_logits_stay_finite(name):
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    loss = LOSSES.build(name)(logits, torch.tensor([1]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", list(LOSSES))
@pytest.mark.parametrize(
    "targets", [torch.zeros(5, dtype=torch.long), torch.zeros(6, 3), torch.zeros(6)], ids=["B", "C", "dtype"]
)
def test_targets_of_another_shape_are_refused(name, targets):
    with pytest.raises(FathomsError, match="give integer labels"):
        LOSSES.build(name)(data()[0], targets)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bce", {"over_classes": "max"}, "no reduction is called 'max'"),
        ("cross_entropy", {"over_classes": "sum"}, "loss 'cross_entropy' takes no over_classes"),
        ("crossentropy", {}, "did you mean 'cross_entropy'"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(name, options, message):
    with pytest.raises(FathomsError, match=message) as caught:
        LOSSES.build(name, **options)
    assert "\n" not in str(caught.value)
