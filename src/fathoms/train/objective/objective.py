"""The training objective: the classification loss, with the penalties and the teacher of the recipe."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.models.vit import ViT
from fathoms.train.objective.distillation import build_teacher, class_logits
from fathoms.train.objective.loss import LOSSES
from fathoms.train.objective.penalties import WithPenalties
from fathoms.train.recipe.recipe import Recipe


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
        self.teacher = build_teacher(recipe, len(classes), device)
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
