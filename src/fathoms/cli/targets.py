"""The trained model, its preprocessing and the images that validate, predict, export, probe and cost work on."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathoms.cli.flags.early_checks import path_or_digits
from fathoms.errors import ConfigError, printable

if TYPE_CHECKING:
    from torch import Tensor

    from fathoms.evaluating.load import LoadedModel
    from fathoms.evaluating.preprocessing import Preprocessing

DEFAULT = "vit_digits"


def load_target(text: str | None, model: str | None, switches: dict[str, Any], seed: int = 0) -> LoadedModel:
    """The model that TARGET names: of the zoo or timm with random weights, or a run, a checkpoint, a weights file.

    Args:
        text: TARGET; None is the model of --model, or the default.
        model: --model, the architecture of a weights file.
        switches: Fields of ViTConfig that were given.
        seed: Seed of random weights.
    """
    from fathoms.evaluating.load import load_run, new_model
    from fathoms.models.model_sources import resolve

    if text is None or text == model:
        text, model = model or DEFAULT, None
    if resolve(text, "TARGET").kind in ("path", "hub"):
        return load_run(text, model, **switches)
    if model is not None:
        raise ConfigError(
            f"--model {model}: TARGET {text} is an architecture already; leave one of the two out"
        )
    return new_model(text, seed, flag="TARGET", **switches)


def prepared_as(args: Any, loaded: LoadedModel) -> Preprocessing:
    """The preprocessing of a model, except for the flags --mean, --std, --crop-pct and --interpolation."""
    changes = {name: getattr(args, name) for name in ("crop_pct", "interpolation", "mean", "std")}
    return loaded.preprocessing.changed(**changes)


def say_taken(args: Any, loaded: LoadedModel, preprocessing: Preprocessing) -> None:
    """What a command took that no flag named: weights of a run folder, and a preprocessing that nothing records.

    On standard error, and after the work, so that a refusal is one line.
    """
    folder, file, lines = Path(args.checkpoint), Path(loaded.source), list(loaded.notes)
    if folder.is_dir():
        last = folder / "checkpoints" / "last"
        best = file.parent == folder / "checkpoints" / "best"
        other = f"; for the last, give {shlex.quote(str(last))}" if last.is_dir() else ""
        lines.append(f"weights: {loaded.source}{f', of the best epoch on val{other}' if best else ''}")
    if loaded.assumed and None in (args.mean, args.std):
        lines.append(
            f"{args.checkpoint}: does not say how its images are prepared; taken {loaded.assumed}: {preprocessing}; "
            "--mean, --std, --crop-pct and --interpolation change it"
        )
    for line in lines:
        print(printable(line), file=sys.stderr)


def check_head(target: LoadedModel, remedy: str) -> None:
    """Refuse a model without a head where optimizer steps are to be taken."""
    if not target.num_classes:
        raise ConfigError(
            f"--num-classes 0: a model without a head has no classes to take steps on; {remedy}"
        )


def load_images(
    target: LoadedModel, data: str | None, count: int, spare: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Images spread evenly over a data set or over the built-in digits, with their labels.

    Labels are the model's outputs, by the names of its classes where it has them; None where they do not match.

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


def classes_of(data: str | None) -> int:
    """Number of classes of a data set, or of the built-in digits."""
    data = path_or_digits(data)
    return 10 if data is None else len(training_split(data).classes)


def training_split(data: str) -> Any:
    """The training images of a data set, all of them where it has no val split of its own."""
    from fathoms.data.sources.splits import open_roles, share_for_comparison

    return open_roles(data, None if share_for_comparison(data) is None else 0.0).train


def _digits(target: LoadedModel, _data: str, count: int, spare: int) -> tuple[Any, Any]:
    from fathoms.data.sources.arrays import digits

    images, labels = digits(target.image_size, target.in_channels)
    if not 1 <= count <= len(images):
        raise ConfigError(f"--batch-size {count}: use 1 to {len(images)}, the number of digits")
    return images[: count + spare], labels[: count + spare]


def _of_data(target: LoadedModel, data: str, count: int, spare: int) -> tuple[Any, Any]:
    import numpy as np
    import torch

    from fathoms.data import LoaderOptions
    from fathoms.data.sources.splits import open_held_out, subset
    from fathoms.evaluating.preprocessing import eval_loader
    from fathoms.evaluating.results import match_classes

    source = open_held_out(data) if target.trained else training_split(data)
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
    labels = torch.cat([batch.labels for batch in batches])
    if target.classes and target.classes != tuple(source.classes):
        try:
            labels = torch.tensor(match_classes(source.classes, target.classes, data))[labels]
        except ConfigError:
            # Data of other classes: more than any model has outputs.
            labels = labels + target.num_classes
    return images, labels


def optimizer_of(args: Any) -> Any:
    """A function that makes the optimizer of --opt and --lr for a model."""
    from fathoms.models.param_groups import param_groups
    from fathoms.training.optimization import build_optimizer

    return lambda model: build_optimizer(param_groups(model, 0.05), args.opt, lr=args.lr)
