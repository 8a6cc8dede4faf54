"""The teacher of a distillation, built from its name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.models.build_timm import TIMM, timm_teacher
from fathoms.models.weights import load_weights
from fathoms.models.zoo import create_model
from fathoms.train.objective.distillation import Teacher, check_distillation, class_logits, distillation_loss
from fathoms.train.recipe.recipe import Recipe


class Distillation:
    """A teacher and how much it counts."""

    def __init__(self, teacher: Teacher, recipe: Recipe) -> None:
        self.teacher = teacher
        self.kind, self.alpha, self.tau = (
            recipe.distillation_type,
            recipe.distillation_alpha,
            recipe.distillation_tau,
        )
        check_distillation(self.kind, self.alpha, self.tau)

    def loss(self, heads: tuple[Tensor, ...], images: Tensor, base: nn.Module, targets: Tensor) -> Tensor:
        """The labels' loss and the teacher's, weighed."""
        labels = base(class_logits(heads, self.kind), targets)
        return distillation_loss(heads, self.teacher(images), labels, self.kind, self.alpha, self.tau)


def build_teacher(recipe: Recipe, classes: int, device: torch.device) -> Distillation | None:
    """The teacher that a recipe names: NAME=WEIGHTS, timm/NAME with timm's own weights, or NAME untrained.

    An untrained teacher teaches noise, so a fathoms name needs its weights.
    """
    if recipe.teacher is None:
        return None
    name, _, weights = recipe.teacher.partition("=")
    own_mean, own_std = recipe.mean, recipe.std
    model: nn.Module
    if name.startswith(TIMM):
        model, own_mean, own_std = timm_teacher(name, classes)
    elif not weights:
        raise ConfigError(
            f"--teacher {name}: an untrained teacher teaches noise; give --teacher {name}=WEIGHTS"
        )
    else:
        model = create_model(name, num_classes=classes)
        load_weights(model, weights)
    return Distillation(Teacher(model, recipe.mean, recipe.std, own_mean, own_std).to(device), recipe)
