"""Accuracy, calibration and confusion against a count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fathoms import FathomsError
from fathoms.data import Batch
from fathoms.evaluating import metrics
from fathoms.evaluating.metrics import FewerChannels, Tally, evaluate


class Fixed(nn.Module):
    """Returns the logits that are written into the images."""

    def forward(self, images):
        return images[:, 0, 0, :]


def batches(logits, labels, size=3):
    for start in range(0, len(labels), size):
        part = logits[start : start + size]
        ids = torch.arange(start, start + len(part))
        yield Batch(part[:, None, None, :].expand(-1, 3, 2, -1), labels[start : start + size], ids, 0, start)


def test_numbers_agree_with_a_count_by_hand():
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(50, 7), torch.randint(0, 7, (50,))
    report = evaluate(Fixed().train(), batches(logits, labels), 7)
    assert report.images == 50
    assert report.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert report.top1 == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    five = (logits.topk(5).indices == labels[:, None]).any(1).float().mean().item()
    assert report.top5 == pytest.approx(100 * five)
    for index in range(7):
        mine = labels == index
        assert report.per_class[index] == pytest.approx(
            100 * (logits.argmax(1)[mine] == index).float().mean().item()
        )
    assert sum(map(sum, report.confusion)) == 50
    confidence, predicted = logits.softmax(1).max(1)
    error = 0.0
    for low in range(15):
        inside = (confidence * 15).long().clamp(max=14) == low
        if inside.any():
            gap = confidence[inside].mean() - (predicted == labels)[inside].float().mean()
            error += inside.float().mean().item() * abs(gap.item())
    assert report.calibration_error == pytest.approx(100 * error, rel=1e-4)


def test_an_image_that_could_not_be_read_is_counted_apart():
    logits = torch.eye(3)
    report = evaluate(Fixed(), batches(logits, torch.tensor([0, -1, 1])), 3)
    assert (report.images, report.skipped, report.top1) == (2, 1, 50.0)
    with pytest.raises(FathomsError, match="no image could be read"):
        evaluate(Fixed(), batches(logits, torch.tensor([-1, -1, -1])), 3)


def test_a_subset_of_classes_is_judged_among_themselves():
    logits = torch.tensor([[0.0, 9.0, 1.0, 0.5], [0.0, 9.0, 0.5, 1.0]])
    report = evaluate(Fixed(), batches(logits, torch.tensor([1, 0])), 2, label_map=[3, 2])
    assert report.top1 == 100.0
    with pytest.raises(FathomsError, match="the model has 4 outputs, the data 2 classes"):
        evaluate(Fixed(), batches(logits, torch.tensor([1, 0])), 2)


def test_the_mode_of_every_module_is_restored():
    model = Fixed().train()
    evaluate(model, batches(torch.eye(3), torch.arange(3)), 3)
    assert model.training
    # A wrapper is new and in training mode; what it wraps must not follow it there.
    model.eval()
    evaluate(FewerChannels(model, 3), batches(torch.eye(3), torch.arange(3)), 3)
    assert not model.training


def test_grey_models_see_one_channel():
    seen = []
    model = nn.Module()
    model.forward = lambda images: seen.append(images.shape) or images.sum((2, 3))
    FewerChannels(model, 1)(torch.ones(2, 3, 4, 4))
    assert seen == [(2, 1, 4, 4)]


def test_tallies_add_up_over_batches_of_any_size():
    torch.manual_seed(0)
    logits, labels = torch.randn(20, 4), torch.randint(0, 4, (20,))
    one, many = Tally(4), Tally(4)
    one.add(logits, labels)
    for index in range(20):
        many.add(logits[index : index + 1], labels[index : index + 1])
    assert one.result().summary() == pytest.approx(many.result().summary())


def test_a_rank_without_images_adds_nothing(monkeypatch):
    """Fewer images than ranks: this rank has none, and the other has counted three."""
    other, mine = Tally(3), Tally(3)
    other.add(torch.eye(3), torch.arange(3))

    def gather(counts, _mine):
        counts[1] = ((np.array([0, 4, 8]), np.array([1, 1, 1])), (0, 0))

    monkeypatch.setattr(metrics.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(metrics.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(metrics.dist, "all_gather_object", gather)
    monkeypatch.setattr(
        metrics.dist, "all_reduce", lambda tensor: tensor.add_({5: other.sums}.get(len(tensor), other.bins))
    )
    result = mine.result()
    assert (result.images, result.top1, result.correct) == (3, 100.0, ())
    assert result.per_class == (100.0, 100.0, 100.0)


def test_confusions_of_many_classes_take_little_memory():
    classes = 200_000
    tally = Tally(classes)
    tally.add(-torch.arange(classes).expand(2, -1).float(), torch.tensor([7, 0]))
    result = tally.result()
    assert result.confusion.pairs() == [[0, 0, 1], [7, 0, 1]]
    assert (result.confusion[7][:3], result.per_class[7]) == ([1, 0, 0], 0.0)


def test_real_labels_count_images_that_were_read_by_the_classes_of_the_data():
    logits = torch.tensor([[0.0, 9.0, 1.0], [0.0, 1.0, 9.0], *3 * [[9.0, 1.0, 0.0]]])
    labels = torch.tensor([0, 0, 1, -1, 1])
    real = {0: (1, 0), 1: (0, 2), 3: (2,), 4: (2,)}
    # The model's outputs 1, 2 and 0 are the data's classes 0, 1 and 2.
    result = evaluate(Fixed(), batches(logits, labels), 3, label_map=[1, 2, 0], real=real)
    assert result.real_top1 == pytest.approx(200 / 3)
    assert evaluate(Fixed(), batches(logits, labels), 3).real_top1 is None


def test_each_image_is_kept_as_right_or_wrong_and_a_number_that_is_none_has_no_confidence():
    logits, labels = torch.eye(3)[torch.tensor([0, 1, 2, 0])], torch.tensor([0, 1, 0, 2])
    report = evaluate(Fixed().train(), batches(logits, labels), 3)
    assert report.correct == (True, True, False, False)
    assert report.correct_bits() == bytes([0b11000000])
    diverged = evaluate(Fixed().train(), batches(torch.full((4, 8), float("nan")), labels + 5), 8)
    assert diverged.top1 == diverged.calibration_error == 0
