"""Distillation matches the paper, for one head and for two, and the teacher is not trained."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fathoms import FathomsError, ViT, ViTConfig, create_model, save_weights
from fathoms.evaluating.load import load_run
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.models.zoo import IMAGENET
from fathoms.training.objective import (
    Distillation,
    Objective,
    Teacher,
    build_teacher,
    class_logits,
    distillation_loss,
)
from fathoms.training.recipe import Recipe


def data(heads=1):
    generator = torch.Generator().manual_seed(0)
    student = tuple((3 * torch.randn(4, 5, generator=generator)).requires_grad_() for _ in range(heads))
    teacher = 3 * torch.randn(4, 5, generator=generator)
    labels = torch.randint(5, (4,), generator=generator)
    return student, teacher, labels


def softmax(row, tau):
    exponentials = [math.exp(value / tau) for value in row]
    return [value / sum(exponentials) for value in exponentials]


def by_hand(student, teacher, base, kind, alpha, tau):
    """Equations 2 and 3 of arXiv:2012.12877, in plain Python."""
    total = 0.0
    for ours, theirs in zip(student.tolist(), teacher.tolist(), strict=True):
        if kind == "hard":
            total -= math.log(softmax(ours, 1.0)[theirs.index(max(theirs))])
        else:
            pairs = zip(softmax(theirs, tau), softmax(ours, tau), strict=True)
            total += tau**2 * sum(p * math.log(p / q) for p, q in pairs)
    return (1 - alpha) * base + alpha * total / len(student)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize(("alpha", "tau"), [(0.5, 1.0), (0.1, 3.0), (1.0, 0.5), (0.0, 1.0)])
def test_the_loss_is_the_papers(heads, kind, alpha, tau):
    student, teacher, labels = data(heads)
    base = F.cross_entropy(class_logits(student, kind), labels)
    loss = distillation_loss(student, teacher, base, kind, alpha, tau)
    assert loss.item() == pytest.approx(
        by_hand(student[-1], teacher, base.item(), kind, alpha, tau), rel=1e-5
    )


def test_hard_with_half_is_deits_own_loss():
    student, teacher, labels = data(2)
    base = F.cross_entropy(student[0], labels)
    loss = distillation_loss(student, teacher, base, "hard")
    assert loss.item() == pytest.approx(
        (base / 2 + F.cross_entropy(student[1], teacher.argmax(1)) / 2).item()
    )


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_each_of_two_heads_learns_from_its_own_source(kind):
    student, teacher, labels = data(2)
    base = F.cross_entropy(class_logits(student, kind), labels)
    distillation_loss(student, teacher, base, kind, alpha=0.25, tau=2.0).backward()
    (expected,) = torch.autograd.grad(0.75 * F.cross_entropy(student[0], labels), student[0])
    assert torch.allclose(student[0].grad, expected)
    if kind == "soft":
        gap = (student[1] / 2).softmax(1) - (teacher / 2).softmax(1)
        assert torch.allclose(student[1].grad, 0.25 * 2.0 * gap.detach() / 4, atol=1e-6)


def test_a_student_like_its_teacher_loses_nothing_softly():
    student, _, _ = data()
    loss = distillation_loss(student, student[0].detach(), torch.zeros(()), "soft", 1.0, 2.0)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)


def test_without_distillation_both_heads_learn_from_the_labels():
    student, _, labels = data(2)
    logits = class_logits(student)
    assert torch.allclose(logits, (student[0] + student[1]) / 2)
    F.cross_entropy(logits, labels).backward()
    assert student[1].grad.any()
    assert class_logits(student[:1]) is student[0]


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_low_precision_heads_give_a_float32_loss(kind):
    student, teacher, _ = data()
    low = student[0].detach().bfloat16().requires_grad_()
    loss = distillation_loss((low,), teacher.bfloat16(), torch.zeros(()), kind)
    assert loss.dtype == torch.float32
    loss.backward()
    assert low.grad.isfinite().all()


def teacher_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(5)
    )


def test_the_teacher_never_learns():
    model = teacher_model()
    model(torch.randn(2, 3, 8, 8))
    teacher = Teacher(model)
    wrapped = nn.ModuleDict({"teacher": teacher}).train()
    assert not any(module.training for module in wrapped["teacher"].modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    images = torch.randn(4, 3, 8, 8, requires_grad=True)
    first, second = teacher(images), teacher(images)
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_images_come_to_the_teacher_in_its_own_normalisation():
    pixels = torch.rand(2, 3, 4, 4)
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
    own_mean, own_std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

    def normalised(mean, std):
        return (pixels - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    teacher = Teacher(nn.Flatten(), mean, std, own_mean, own_std)
    # Two roundings in float32 of numbers up to 3.
    expected = normalised(own_mean, own_std).flatten(1)
    assert torch.allclose(teacher(normalised(mean, std)), expected, atol=1e-6)
    same = Teacher(nn.Flatten(), mean, std)
    images = normalised(mean, std)
    assert torch.equal(same(images), images.flatten(1))
    assert not same.converts


def test_a_distilled_vit_learns_from_a_vit():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "dim": 16, "heads": 2, "depth": 1, "num_classes": 5}
    student, teacher = ViT(ViTConfig(**sizes, distill_token=True)), Teacher(ViT(ViTConfig(**sizes)))
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    heads = student.forward_heads(student.forward_features(images))
    base = F.cross_entropy(class_logits(heads, "hard"), labels)
    distillation_loss(heads, teacher(images), base, "hard").backward()
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.parametrize("teacher", [None, "hard"])
def test_the_objective_of_a_model_with_two_heads_sees_both(teacher):
    """The accuracy is that of the class head; without a teacher both heads learn from the labels."""
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "dim": 16, "heads": 2, "depth": 1, "num_classes": 5}
    model, names = ViT(ViTConfig(**sizes, distill_token=True)), tuple("abcde")
    objective = Objective(Recipe(smoothing=0.0), model, names, torch.device("cpu"))
    if teacher:
        taught = Teacher(ViT(ViTConfig(**sizes)))
        objective.teacher = Distillation(taught, Recipe(teacher="t", distillation_type="hard"))
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    loss, logits = objective.loss(objective.model, images, labels)
    own, other = model.forward_heads(model.forward_features(images))
    assert torch.equal(logits, own)
    expected = F.cross_entropy((own + other) / 2, labels)
    if teacher:
        expected = (F.cross_entropy(own, labels) + F.cross_entropy(other, taught(images).argmax(1))) / 2
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_teacher_of_other_classes_is_refused_in_one_line():
    student, _, _ = data()
    with pytest.raises(FathomsError, match=r"the teacher's logits are \(4, 3\).*of the same classes$"):
        distillation_loss(student, torch.zeros(4, 3), torch.zeros(()), "hard")


@pytest.mark.parametrize("given", [{"std": (0.5, 0.0, 0.5)}, {"own_mean": (0.5,)}], ids=str)
def test_bad_statistics_are_refused(given):
    with pytest.raises(FathomsError, match="one number per channel"):
        Teacher(nn.Identity(), **{"mean": (0.5,) * 3, "std": (0.5,) * 3} | given)


def teach(teacher, classes=10):
    recipe = Recipe(teacher=teacher, distillation_type="hard")
    return build_teacher(recipe, tuple(map(str, range(classes))), torch.device("cpu"))


def test_a_run_folder_is_a_teacher_with_its_own_normalisation(digits_run):
    teacher = teach(str(digits_run)).teacher
    own = load_run(str(digits_run))
    images = torch.randn(2, 1, 8, 8)
    assert teacher.converts == (own.preprocessing.mean != Preprocessing().mean)
    teacher.converts = False
    assert torch.equal(teacher(images), own.model(images))
    with pytest.raises(FathomsError, match=r"--teacher .*: has 10 classes, the data has 4"):
        teach(str(digits_run), classes=4)


def test_a_teachers_outputs_are_those_of_the_students_classes(digits_run):
    """They were taken in the teacher's order, whatever its classes were called."""
    recipe = Recipe(teacher=str(digits_run), distillation_type="hard")
    names = load_run(digits_run).classes
    turned = build_teacher(recipe, names[::-1], torch.device("cpu")).teacher
    images = torch.randn(2, 1, 8, 8)
    plain = build_teacher(recipe, names, torch.device("cpu")).teacher(images)
    assert torch.equal(turned(images), plain.flip(1))
    with pytest.raises(FathomsError, match="--teacher .*: the model has no class 'owl'"):
        build_teacher(recipe, ("owl", *names[1:]), torch.device("cpu"))


def test_weights_under_a_name_are_a_teacher_with_the_data_configuration_of_the_name(tmp_path):
    name, weights = "vit_tiny_patch16_224", tmp_path / "bare.safetensors"
    model = create_model(name, num_classes=10)
    torch.nn.init.normal_(model.head.weight)
    save_weights(model, weights)
    teacher = teach(f"{name}={weights}").teacher
    images = torch.rand(1, 3, 224, 224)
    mean, std = (torch.tensor(row)[:, None, None] for row in IMAGENET.values())
    assert torch.allclose(teacher((images - mean) / std), model.eval()((images - 0.5) / 0.5), atol=1e-4)
    with pytest.raises(FathomsError, match=r"--teacher .*: has 10 classes, the data has 4"):
        teach(f"{name}={weights}", classes=4)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("vit_digits", "an untrained teacher teaches noise; give --teacher vit_digits=WEIGHTS.safetensors"),
        ("vit_digits=", "an untrained teacher teaches noise"),
        ("vit_digits=no/such.safetensors", "--teacher vit_digits= no/such.safetensors: no such file"),
        ("vit_digit=w.safetensors", "no model is called 'vit_digit'; did you mean 'vit_digits'"),
        ("runs/nosuch", "--teacher runs/nosuch: no such file or folder"),
    ],
)
def test_a_teacher_that_is_not_there_is_refused_at_once(teacher, message):
    with pytest.raises(FathomsError, match=message):
        teach(teacher)


def test_a_timm_teacher_out_of_reach_is_one_line(monkeypatch):
    timm = pytest.importorskip("timm")
    monkeypatch.setattr("fathoms.machine.reachable", lambda *_: False)

    def unreachable(*_args, **_options):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(
        FathomsError, match="--teacher timm/vit_tiny_patch16_224: no pretrained weights .the Hub"
    ):
        teach("timm/vit_tiny_patch16_224")
