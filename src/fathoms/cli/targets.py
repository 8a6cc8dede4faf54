"""The model and the images that `fathoms probe` and `fathoms cost` work on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fathoms.cli.flags.early_checks import path_or_digits
from fathoms.errors import ConfigError, WeightsError, flag_of

if TYPE_CHECKING:
    from torch import Tensor

    from fathoms.evaluate.load import LoadedModel

DEFAULT = "vit_digits"


def load_target(text: str | None, model: str | None, switches: dict[str, Any], seed: int = 0) -> LoadedModel:
    """The model that TARGET names: of the zoo or timm with random weights, or a run, a checkpoint, a weights file.

    Args:
        text: TARGET; None is the model of --model, or the default.
        model: --model, the architecture of a weights file.
        switches: Fields of ViTConfig that were given.
        seed: Seed of random weights.
    """
    from fathoms.evaluate.load import new_model
    from fathoms.models.resolve import resolve

    if text is None or text == model:
        text, model = model or DEFAULT, None
    if resolve(text, "TARGET").kind in ("path", "hub"):
        return _load_trained(text, model, switches)
    if model is not None:
        raise ConfigError(
            f"--model {model}: TARGET {text} is an architecture already; leave one of the two out"
        )
    return new_model(text, seed, flag="TARGET", **switches)


def check_head(target: LoadedModel, remedy: str) -> None:
    """Refuse a model without a head where optimizer steps are to be taken."""
    if not target.num_classes:
        raise ConfigError(
            f"--num-classes 0: a model without a head has no classes to take steps on; {remedy}"
        )


def _load_trained(text: str, model: str | None, switches: dict[str, Any]) -> LoadedModel:
    """Weights with their model; where switches make it another one, the message names them."""
    from fathoms.evaluate.load import load_run
    from fathoms.models.weights import MisfitError, said

    try:
        return load_run(text, model, **switches)
    except MisfitError as error:
        if model is not None or not switches:
            raise
        flags = " ".join(map(flag_of, switches))
        why = said(error.settings) or str(error)
        raise WeightsError(f"{flags}: {text} was trained as another model ({why}); leave it out") from error


def load_images(
    target: LoadedModel, data: str | None, count: int, spare: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Images spread evenly over a data set or over the built-in digits, with their labels.

    Labels are None where the model has too few outputs for them.

    Args:
        target: The model that takes them.
        data: The data set; None for the digits.
        count: How many; a data set with fewer is refused.
        spare: How many more, as far as there are.
    """
    data = path_or_digits(data)
    found = _digits if data is None else _of_data
    images, labels = found(target, str(data), count, spare)
    return images, labels if int(labels.max()) < target.num_classes else None


def _digits(target: LoadedModel, _data: str, count: int, spare: int) -> tuple[Any, Any]:
    from fathoms.data.sources.digits import digits

    images, labels = digits(target.image_size, target.in_channels)
    if not 1 <= count <= len(images):
        raise ConfigError(f"--batch-size {count}: use 1 to {len(images)}, the number of digits")
    return images[: count + spare], labels[: count + spare]


def _of_data(target: LoadedModel, data: str, count: int, spare: int) -> tuple[Any, Any]:
    import numpy as np
    import torch

    from fathoms.data import LoaderOptions
    from fathoms.data.sources.splits import open_held_out, open_roles
    from fathoms.data.sources.subset import subset
    from fathoms.evaluate.loader import eval_loader

    source = open_held_out(data) if target.trained else open_roles(data, 0.0).train
    if not len(source):
        raise ConfigError(f"{data}: holds no images; give another data set")
    if not 1 <= count <= len(source):
        raise ConfigError(f"--batch-size {count}: use 1 to {len(source)}, the number of images")
    wanted = min(count + spare, len(source))
    spread = np.unique(np.linspace(0, len(source) - 1, wanted).round().astype(np.int64))
    # Any order but by class: a step then sees more than one of them.
    spread = np.random.default_rng(0).permutation(spread)
    chosen = subset(source, spread, "probe")
    options = LoaderOptions(grey=target.in_channels == 1)
    size = min(count, len(spread))
    loader = eval_loader(chosen, target.image_size, size, target.preprocessing, options=options)
    batches = list(loader.epoch(0))
    images = torch.cat([batch.images for batch in batches])[:, : target.in_channels].float()
    return images, torch.cat([batch.labels for batch in batches])
