"""The model and the images that `fathoms probe` and `fathoms cost` work on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn

DEFAULT = "vit_digits"


@dataclass(frozen=True)
class Target:
    """A model by its name, built or loaded.

    Args:
        model: The model.
        name: What the user called it.
        config: Its config; None for a timm model.
        image_size: Side of its images.
        in_channels: Channels of its images.
        classes: Number of its outputs.
        trained: Whether its weights come from a file.
        run: Its run folder, if it has one.
        recipe: How it was trained.
        data: What it was trained on.
    """

    model: nn.Module
    name: str
    config: Any
    image_size: int
    in_channels: int
    classes: int
    trained: bool = False
    run: Path | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    data: str | None = None


def load_target(text: str | None, model: str | None, switches: dict[str, Any], seed: int = 0) -> Target:
    """The model that TARGET names: of the zoo or timm with random weights, or a run, a checkpoint, a weights file.

    Args:
        text: TARGET; None is the model of --model, or the default.
        model: --model, the architecture of a weights file.
        switches: Fields of ViTConfig that were given.
        seed: Seed of random weights.
    """
    from fathoms.models.resolve import resolve

    if text is None or text == model:
        text, model = model or DEFAULT, None
    found = resolve(text, "TARGET")
    if found.kind in ("path", "hub"):
        return _trained(text, model, switches)
    if model is not None:
        raise ConfigError(
            f"--model {model}: TARGET {text} is an architecture already; leave one of the two out"
        )
    import torch

    torch.manual_seed(seed)
    if found.kind == "timm":
        return _timm(text, switches)
    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config

    config = model_config(text, **switches)
    return Target(ViT(config), text, config, config.image_size, config.in_channels, config.num_classes)


def _timm(name: str, switches: dict[str, Any]) -> Target:
    from fathoms.models.build_timm import build_timm, timm_size

    for option in switches.keys() - {"num_classes"}:
        flag = option.replace("_", "-")
        raise ConfigError(f"--{flag}: a timm model is built as its name says; leave it out")
    model: Any = build_timm(name, switches.get("num_classes"), flag="TARGET")
    return Target(
        model, name, None, timm_size(name), int(getattr(model, "in_chans", 3)), int(model.num_classes)
    )


def _trained(text: str, model: str | None, switches: dict[str, Any]) -> Target:
    from fathoms.evaluate.load import load_run

    loaded = load_run(text, model, **switches)
    shape = (loaded.image_size, loaded.in_channels, loaded.num_classes)
    return Target(loaded.model, text, loaded.config, *shape, True, loaded.run, loaded.recipe, loaded.data)


def load_images(target: Target, data: str | None, count: int) -> tuple[Tensor, Tensor | None]:
    """`count` images, spread evenly over a data set or over the built-in digits, with their labels.

    Labels are None where the model has too few outputs for them.
    """
    images, labels = (
        _digits(target, count) if data in (None, "digits") else _of_data(target, str(data), count)
    )
    return images, labels if int(labels.max()) < target.classes else None


def _digits(target: Target, count: int) -> tuple[Any, Any]:
    from fathoms.data.sources.digits import digits

    images, labels = digits(target.image_size, target.in_channels)
    if not 1 <= count <= len(images):
        raise ConfigError(f"--batch-size {count}: use 1 to {len(images)}, the number of digits")
    return images[:count], labels[:count]


def _of_data(target: Target, data: str, count: int) -> tuple[Any, Any]:
    import numpy as np
    import torch

    from fathoms.data.sources.splits import open_held_out, open_roles
    from fathoms.data.sources.subset import subset
    from fathoms.evaluate.loader import eval_loader
    from fathoms.evaluate.preprocessing import Preprocessing

    source = open_held_out(data) if target.trained else open_roles(data, 0.0).train
    if not len(source):
        raise ConfigError(f"{data}: holds no images; give another data set")
    if not 1 <= count <= len(source):
        raise ConfigError(f"--batch-size {count}: use 1 to {len(source)}, the number of images")
    spread = np.unique(np.linspace(0, len(source) - 1, count).round().astype(np.int64))
    # Any order but by class: a step then sees more than one of them.
    spread = np.random.default_rng(0).permutation(spread)
    loader = eval_loader(
        subset(source, spread, "probe"), target.image_size, len(spread), Preprocessing.of(target.recipe)
    )
    batches = list(loader.epoch(0))
    images = torch.cat([batch.images for batch in batches])[:, : target.in_channels].float()
    return images, torch.cat([batch.labels for batch in batches])
