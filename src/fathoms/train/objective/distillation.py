"""Distillation as in DeiT and CaiT: the teacher, built from its name, and its share of the loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError, ShapeError
from fathoms.models.build_timm import timm_teacher
from fathoms.models.weights import load_weights
from fathoms.models.zoo import create_model
from fathoms.names.registry import check_name
from fathoms.train.recipe.names import teacher_kind
from fathoms.train.recipe.recipe import Recipe

KINDS = ("none", "soft", "hard")


def class_logits(heads: tuple[Tensor, ...], kind: str = "none") -> Float[Tensor, "B C"]:
    """The logits that the labels train: the class head when distilling, otherwise the mean of all heads.

    Without a teacher a distillation head would learn nothing, so both are averaged, as in inference.
    """
    check_name(kind, KINDS, "distillation", "--distillation-type")
    return heads[0] if kind != "none" or len(heads) == 1 else torch.stack(heads).mean(0)


def distillation_loss(
    student_heads: tuple[Tensor, ...],
    teacher_logits: Float[Tensor, "B C"] | None,
    base_loss: Float[Tensor, ""],
    kind: str = "none",
    alpha: float = 0.5,
    tau: float = 1.0,
) -> Float[Tensor, ""]:
    """Distillation loss: (1 - alpha) * base_loss + alpha * (loss of the last head on the teacher's logits).

    "hard" is the cross-entropy with the teacher's argmax, "soft" is tau² KL(teacher / tau || student / tau), the
    mean over the batch. With one head the labels and the teacher train the same logits, as in CaiT; with two
    the teacher trains the distillation head. (DeiT's code divides "soft" by the number of classes once more;
    this is the formula of its paper.)

    Args:
        student_heads: The student's logits, one tensor or two, of shape (B, C).
        teacher_logits: The teacher's logits for the same images; None if kind is "none".
        base_loss: The loss of `class_logits` on the labels.
        kind: "none" returns `base_loss`; "soft" or "hard".
        alpha: Weight of the teacher.
        tau: Temperature of "soft".

    Paper: Touvron et al. 2020, arXiv:2012.12877.
    """
    check_distillation(kind, alpha, tau)
    if kind == "none":
        if teacher_logits is not None:
            raise ConfigError("--distillation-type is none, but there is a teacher; use hard or soft")
        return base_loss
    student = student_heads[-1]
    if teacher_logits is None or teacher_logits.shape != student.shape:
        given = "missing" if teacher_logits is None else tuple(teacher_logits.shape)
        raise ShapeError(
            f"distillation: the teacher's logits are {given}, the student's {tuple(student.shape)}; "
            "give a teacher of the same classes"
        )
    wide = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(wide), teacher_logits.detach().to(wide)
    if kind == "hard":
        distilled = F.cross_entropy(student, teacher.argmax(dim=1))
    else:
        ours, theirs = (student / tau).log_softmax(1), (teacher / tau).log_softmax(1)
        distilled = tau**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return (1 - alpha) * base_loss + alpha * distilled


def check_distillation(kind: str, alpha: float = 0.5, tau: float = 1.0) -> None:
    """Raise for an unknown kind, or a weight or temperature out of range."""
    check_name(kind, KINDS, "distillation", "--distillation-type")
    if not 0 <= alpha <= 1:
        raise ConfigError(f"--distillation-alpha {alpha}: must be between 0 and 1; 0.5 is usual")
    if not tau > 0:
        raise ConfigError(f"--distillation-tau {tau}: must be above zero; 1 is usual")


class Teacher(nn.Module):
    """A frozen model: always in eval mode, without gradients.

    It is given the student's images, augmented and normalised. If it was trained with another mean and standard
    deviation, they are converted: x' = (x * std + mean - mean') / std'.

    Args:
        model: The teacher.
        mean: Mean of each channel that the student's images are normalised with.
        std: Its standard deviation.
        own_mean: The teacher's mean; None: the student's.
        own_std: The teacher's standard deviation.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        own_mean: Sequence[float] | None = None,
        own_std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        given = (mean, std, mean if own_mean is None else own_mean, std if own_std is None else own_std)
        if len({len(row) for row in given}) != 1 or min(*std, *given[3]) <= 0:
            raise ConfigError(
                "--teacher: mean and standard deviation need one number per channel, the latter above zero"
            )
        # In float64, so that equal statistics give a scale of exactly one and a shift of exactly zero.
        ours_mean, ours_std, own_mean_, own_std_ = (torch.tensor(row, dtype=torch.float64) for row in given)
        scale, shift = ours_std / own_std_, (ours_mean - own_mean_) / own_std_
        self.converts = bool((scale != 1).any() or (shift != 0).any())
        self.register_buffer("scale", scale.float()[:, None, None], persistent=False)
        self.register_buffer("shift", shift.float()[:, None, None], persistent=False)
        self.train(False)

    def train(self, mode: bool = True) -> Teacher:
        """Stay in eval mode."""
        del mode
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B classes"]:
        """The teacher's logits."""
        if self.converts:
            images = images * self.scale.to(images.dtype) + self.shift.to(images.dtype)
        return self.model(images)


class Distillation:
    """A teacher with the kind, weight and temperature of its loss."""

    def __init__(self, teacher: Teacher, recipe: Recipe) -> None:
        self.teacher = teacher
        self.kind, self.alpha, self.tau = (
            recipe.distillation_type,
            recipe.distillation_alpha,
            recipe.distillation_tau,
        )
        check_distillation(self.kind, self.alpha, self.tau)

    def loss(self, heads: tuple[Tensor, ...], images: Tensor, base: nn.Module, targets: Tensor) -> Tensor:
        """The weighted sum of the loss on the labels and the loss on the teacher."""
        labels = base(class_logits(heads, self.kind), targets)
        return distillation_loss(heads, self.teacher(images), labels, self.kind, self.alpha, self.tau)


def build_teacher(recipe: Recipe, classes: int, device: torch.device) -> Distillation | None:
    """The teacher of a recipe; None without one.

    timm/NAME with timm's pretrained weights, NAME=WEIGHTS, or a trained model with its record: a run folder, an
    exported file with its card, hf-hub:OWNER/NAME.
    """
    if recipe.teacher is None:
        return None
    kind = teacher_kind(recipe.teacher)
    own_mean, own_std = recipe.mean, recipe.std
    model: nn.Module
    if kind == "weights":
        name, _, weights = recipe.teacher.partition("=")
        model = create_model(name, num_classes=classes)
        load_weights(model, weights)
    elif kind == "timm":
        model, own_mean, own_std = timm_teacher(recipe.teacher, classes)
    else:
        from fathoms.evaluate.load import load_run

        loaded = load_run(recipe.teacher)
        if loaded.num_classes != classes:
            raise ConfigError(
                f"--teacher {recipe.teacher}: has {loaded.num_classes} classes, the data has {classes}"
            )
        model, own_mean, own_std = loaded.model, loaded.preprocessing.mean, loaded.preprocessing.std
    return Distillation(Teacher(model, recipe.mean, recipe.std, own_mean, own_std).to(device), recipe)
