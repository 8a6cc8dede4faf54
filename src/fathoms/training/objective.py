"""The training objective: the classification loss, with the penalties and the teacher of the recipe.

Logits are converted to float32 or wider, also under autocast. Smoothing applies to labels only: soft targets are
smoothed by the mixing that makes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from fathoms.errors import ConfigError, ShapeError
from fathoms.models.build_timm import timm_teacher
from fathoms.models.model_sources import resolve_weights
from fathoms.models.vit import ViT
from fathoms.ops.dispatch import widened
from fathoms.registry import Registry, check_name
from fathoms.training.job import teacher_kind
from fathoms.training.penalties import WithPenalties
from fathoms.training.recipe import Recipe

LOSSES: Registry[nn.Module, None] = Registry("loss")
OVER_CLASSES = ("mean", "sum")


@LOSSES.add("cross_entropy")
class CrossEntropy(nn.Module):
    """Cross-entropy: -sum over classes of target * log softmax(logits), mean over the batch.

    Args:
        smoothing: Share of a label that is spread evenly over all classes.

    >>> CrossEntropy()(torch.zeros(2, 4), torch.tensor([0, 3])).exp().round().item()
    4.0
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def forward(self, logits: Float[Tensor, "B C"], targets: Tensor) -> Float[Tensor, ""]:
        """The loss on labels (B,) or soft targets (B, C)."""
        logits = widened(logits)
        if _are_labels(logits, targets):
            return F.cross_entropy(logits, targets, label_smoothing=self.smoothing)
        return F.cross_entropy(logits, targets.to(logits.dtype))

    def extra_repr(self) -> str:
        return f"smoothing={self.smoothing:g}"


@LOSSES.add("bce")
class BinaryCrossEntropy(nn.Module):
    """Binary cross-entropy of each class, mean over the batch.

    Args:
        smoothing: Share of a label that is spread evenly over all classes.
        target_threshold: Targets above it count as one, others as zero, after smoothing; None keeps them.
        over_classes: "mean" over the classes, or their "sum", which is C times as large.

    Papers: Beyer et al. 2020, arXiv:2006.07159; Wightman et al. 2021, arXiv:2110.00476.
    """

    def __init__(
        self, smoothing: float = 0.0, target_threshold: float | None = None, over_classes: str = "mean"
    ) -> None:
        super().__init__()
        self.smoothing = smoothing
        self.target_threshold = target_threshold
        self.over_classes = check_name(over_classes, OVER_CLASSES, "reduction", "over_classes")

    def forward(self, logits: Float[Tensor, "B C"], targets: Tensor) -> Float[Tensor, ""]:
        """The loss on labels (B,) or soft targets (B, C)."""
        logits = widened(logits)
        if _are_labels(logits, targets):
            targets = _smoothed(targets, logits, self.smoothing)
        if self.target_threshold is not None:
            targets = targets > self.target_threshold
        loss = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))
        return loss if self.over_classes == "mean" else loss * logits.shape[1]

    def extra_repr(self) -> str:
        threshold = self.target_threshold
        return f"smoothing={self.smoothing:g}, target_threshold={threshold}, over_classes={self.over_classes}"


def _are_labels(logits: Tensor, targets: Tensor) -> bool:
    """Whether targets are labels (B,) rather than soft targets (B, C); anything else is an error."""
    if targets.shape == logits.shape[:1] and not targets.is_floating_point():
        return True
    if targets.shape == logits.shape and targets.is_floating_point():
        return False
    raise ShapeError(
        f"loss: targets are {tuple(targets.shape)} of {str(targets.dtype).removeprefix('torch.')} for logits of "
        f"{tuple(logits.shape)}; give integer labels (B,) or soft targets (B, C)"
    )


def _smoothed(labels: Tensor, logits: Tensor, smoothing: float) -> Tensor:
    """Soft targets of labels: 1 - s + s / C on the label, s / C elsewhere."""
    off = smoothing / logits.shape[1]
    return torch.full_like(logits, off).scatter(1, labels.long()[:, None], 1 - smoothing + off)


def class_logits(heads: tuple[Tensor, ...], kind: str = "none") -> Float[Tensor, "B C"]:
    """The logits that the labels train: the class head when distilling, otherwise the mean of all heads.

    Without a teacher a distillation head would learn nothing, so both are averaged, as in inference.
    """
    return heads[0] if kind != "none" or len(heads) == 1 else torch.stack(heads).mean(0)


def distillation_loss(
    student_heads: tuple[Tensor, ...],
    teacher_logits: Float[Tensor, "B C"],
    base_loss: Float[Tensor, ""],
    kind: str,
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
        teacher_logits: The teacher's logits for the same images.
        base_loss: The loss of `class_logits` on the labels.
        kind: "soft" or "hard".
        alpha: Weight of the teacher.
        tau: Temperature of "soft".

    Paper: Touvron et al. 2020, arXiv:2012.12877.
    """
    student = student_heads[-1]
    if teacher_logits.shape != student.shape:
        raise ShapeError(
            f"distillation: the teacher's logits are {tuple(teacher_logits.shape)}, the student's "
            f"{tuple(student.shape)}; give a teacher of the same classes"
        )
    wide = torch.promote_types(student.dtype, torch.float32)
    student, teacher = student.to(wide), teacher_logits.detach().to(wide)
    if kind == "hard":
        distilled = F.cross_entropy(student, teacher.argmax(dim=1))
    else:
        ours, theirs = (student / tau).log_softmax(1), (teacher / tau).log_softmax(1)
        distilled = tau**2 * F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    return (1 - alpha) * base_loss + alpha * distilled


class Teacher(nn.Module):
    """A frozen model: always in eval mode, without gradients.

    It is given the student's images, augmented and normalised. If it was trained with another mean and standard
    deviation, they are converted: x' = (x * std + mean - mean') / std'. `order` has its output for each class of the
    student's data; None takes them as they are.
    """

    scale: Tensor
    shift: Tensor
    order: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        own_mean: Sequence[float] | None = None,
        own_std: Sequence[float] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        index = None if order is None else torch.tensor(order)
        self.register_buffer("order", index, persistent=False)
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
        del mode
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B classes"]:
        if self.converts:
            # A model of one channel sees the first of three.
            scale, shift = (row[: images.shape[1]].to(images.dtype) for row in (self.scale, self.shift))
            images = images * scale + shift
        logits = self.model(images)
        return logits if self.order is None else logits.index_select(1, self.order)


class Distillation:
    """A teacher with the kind, weight and temperature of its loss."""

    def __init__(self, teacher: Teacher, recipe: Recipe) -> None:
        self.teacher = teacher
        self.kind: str = recipe.distillation_type
        self.alpha, self.tau = recipe.distillation_alpha, recipe.distillation_tau

    def loss(self, heads: tuple[Tensor, ...], images: Tensor, base: nn.Module, targets: Tensor) -> Tensor:
        """The weighted sum of the loss on the labels and the loss on the teacher."""
        labels = base(class_logits(heads, self.kind), targets)
        return distillation_loss(heads, self.teacher(images), labels, self.kind, self.alpha, self.tau)


def build_teacher(recipe: Recipe, classes: Sequence[str], device: torch.device) -> Distillation | None:
    """The teacher of a recipe for data of these classes; None without one.

    timm/NAME with timm's pretrained weights, NAME=WEIGHTS, or a trained model with its record: a run folder, an
    exported file with its card, hf-hub:OWNER/NAME.
    """
    if recipe.teacher is None:
        return None
    from fathoms.evaluating.load import load_run
    from fathoms.evaluating.preprocessing import Preprocessing
    from fathoms.evaluating.results import match_classes

    order = None
    kind = teacher_kind(recipe.teacher)
    model: nn.Module
    if kind == "timm":
        model, *own = timm_teacher(recipe.teacher, len(classes))
    else:
        name, _, weights = recipe.teacher.partition("=")
        place = (resolve_weights(weights).text, name) if kind == "weights" else (recipe.teacher,)
        loaded = load_run(*place)
        if loaded.num_classes != len(classes):
            raise ConfigError(
                f"--teacher {recipe.teacher}: has {loaded.num_classes} classes, the data has {len(classes)}"
            )
        if loaded.classes and loaded.classes != tuple(classes):
            order = match_classes(classes, loaded.classes, f"--teacher {recipe.teacher}")
        model, own = loaded.model, [loaded.preprocessing.mean, loaded.preprocessing.std]
    seen = Preprocessing.of(recipe.to_dict())
    return Distillation(Teacher(model, seen.mean, seen.std, *own, order=order).to(device), recipe)


class Objective:
    """The loss of a recipe.

    `model` is the module that is called, compiled and given to DDP: the model itself, or a wrapper that also
    returns the logits of each head and the penalties.
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, classes: Sequence[str], device: torch.device
    ) -> None:
        self.recipe = recipe
        if recipe.bce_loss:
            over = "sum" if recipe.bce_sum else "mean"
            options = {"target_threshold": recipe.bce_target_thresh, "over_classes": over}
            self.base = LOSSES.build("bce", recipe.smoothing, **options)
        else:
            self.base = LOSSES.build("cross_entropy", recipe.smoothing)
        self.teacher = build_teacher(recipe, classes, device)
        penalised = bool(recipe.train_feature_decay or recipe.attn_extra_loss)
        self.model = model
        if isinstance(model, ViT) and (penalised or model.head_dist is not None):
            self.model = WithPenalties(
                model, recipe.train_feature_decay, recipe.attn_extra_loss, recipe.attn_extra_loss_layers
            )
        elif penalised:
            raise ConfigError("--train-feature-decay and --attn-extra-loss work on fathoms models only")

    def loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of a batch on labels or soft targets, and the logits of the class head."""
        out = model(images)
        heads, penalty = out if isinstance(out, tuple) else ((out,), None)
        if self.teacher is None:
            loss = self.base(class_logits(heads), targets)
        else:
            loss = self.teacher.loss(heads, images, self.base, targets)
        return (loss if penalty is None else loss + penalty), heads[0]
