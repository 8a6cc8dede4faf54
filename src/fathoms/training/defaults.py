"""The defaults of a run that names neither a recipe nor a model: a rule over the images, their number and the machine.

The recipe is `small_images`; `chosen` changes nine of its values. docs/training.md has the rule as a table.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fathoms.data.readiness import median_side
from fathoms.data.sources.splits import Roles, open_roles
from fathoms.errors import ConfigError
from fathoms.machine import free_memory, usable_cores
from fathoms.models.config import FIELDS, overridden
from fathoms.training.job import OF_RESULT, RunOptions
from fathoms.training.recipe import read_recipe
from fathoms.untrusted import read_toml

Table = dict[str, Any]

RECIPE = "small_images"
OPTIONS = ("epochs", "batch_size", "warmup_epochs", "aa")
SWITCHES = ("image_size", "patch_size", "dim", "heads", "depth")
"""What the rule decides."""

PATCHES = (4, 8, 16, 32)
LEAST_BATCH = 16
LONG = 50
"""Epochs from which the recipe's RandAugment is used: at 15 it cost three points (results/small_recipes.md)."""
MEMORY_SHARE = 0.5
"""Share of the free memory that an update may take."""


@dataclass(frozen=True)
class Limits:
    """What a kind of device can do in about an hour.

    Args:
        pixels: Largest side of the images.
        tokens: Most patches of an image.
        dim: Width of the model, in heads of 64 channels.
        batch: Largest batch.
        images: Images that are trained on in all epochs together.
        epochs: Fewest and most epochs.
    """

    pixels: int
    tokens: int
    dim: int
    batch: int
    images: int
    epochs: tuple[int, int]


GPU = Limits(pixels=224, tokens=200, dim=384, batch=512, images=10_000_000, epochs=(30, 200))
CPU_CORE = Limits(pixels=64, tokens=64, dim=192, batch=128, images=50_000, epochs=(5, 100))


def limits_of(device: str) -> Limits:
    """The limits of the device that --device names."""
    import torch

    if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()):
        return GPU
    return replace(CPU_CORE, images=CPU_CORE.images * usable_cores())


def chosen(images: int, side: int, limits: Limits, given: Mapping[str, Any]) -> dict[str, Any]:
    """The rule: values by option and switch, from the number of training images and their median shorter side.

    `given` are values that the user gave; the others follow from them.

    >>> chosen(5000, 32, CPU_CORE, {})["patch_size"], chosen(5000, 300, GPU, {"image_size": 96})["patch_size"]
    (4, 8)
    """
    side = given.get("image_size") or min(side, limits.pixels)
    sizes = (
        [2] if side < 16 else [patch for patch in PATCHES if side % patch == 0 or "image_size" not in given]
    )
    few = [patch for patch in sizes if (side // patch) ** 2 <= limits.tokens]
    patch = given.get("patch_size") or (few or sizes or [1])[0]
    dim = given.get("dim") or limits.dim
    heads = next(count for count in range(max(1, dim // 64), 0, -1) if dim % count == 0)
    fewest, most = limits.epochs
    epochs = given.get("epochs") or min(max(limits.images // max(images, 1), fewest), most)
    # A power of two, with which an epoch has thirty updates or more.
    batch = given.get("batch_size") or min(
        max(1 << max(images // 32, 1).bit_length() - 1, LEAST_BATCH), limits.batch
    )
    base = read_recipe(RECIPE)
    return {
        "image_size": given.get("image_size") or max(side // patch, 1) * patch,
        "patch_size": patch,
        "dim": dim,
        "heads": heads,
        "depth": base["model"]["depth"],
        "epochs": epochs,
        "batch_size": batch,
        "warmup_epochs": min(5.0, epochs / 10),
        "aa": base["aa"] if epochs >= LONG else None,
        **given,
    }


def fitting_batch(values: Mapping[str, Any], free: float) -> int:
    """The batch of the rule, halved until an update in float32 takes at most its share of the free memory."""
    import torch

    from fathoms.models.vit import ViT
    from fathoms.models.zoo import model_config
    from fathoms.probes.part_costs import update_memory

    base = read_recipe(RECIPE)
    own = {name: value for name, value in base["model"].items() if name != "name"}
    switches = {name: value for name, value in values.items() if name in FIELDS}
    model = ViT(model_config(base["model"]["name"], **overridden(own, switches)))
    images = torch.zeros(2, model.config.in_channels, values["image_size"], values["image_size"])
    batch = values["batch_size"]
    while batch > 1 and update_memory(model, images, batch, "fp32", base["opt"]) > MEMORY_SHARE * free:
        batch //= 2
    return batch


def starting_table(
    data: str,
    run: RunOptions,
    given: Mapping[str, Any],
    roles: Roles | None = None,
    recorded: Table | None = None,
    runs: int = 1,
) -> Table:
    """The recipe of a run that names none, as the table of a recipe file; that of a run that is there is taken again.

    Args:
        data: Path of the data.
        run: The run options, with the name of the run.
        given: Options and switches that the user gave.
        roles: The data, where they are open already.
        recorded: The settings of a comparison that is there already.
        runs: Runs that share the memory.
    """
    config = Path(run.output) / str(run.experiment) / "config.toml"
    if recorded is None and config.is_file():
        recorded = read_toml(config, ConfigError)
    values = _recorded(recorded or {})
    if values is None:
        train = (roles or open_roles(data, given.get("val_share"))).train
        own = {name: value for name, value in given.items() if value is not None}
        values = chosen(len(train), median_side(train) or GPU.pixels, limits_of(run.device), own)
        if "batch_size" not in own:
            values["batch_size"] = fitting_batch(values, free_memory(run.device) / runs)
    base = read_recipe(RECIPE)
    return {
        **base,
        **{name: values[name] for name in OPTIONS},
        "model": {**base["model"], **{name: values[name] for name in SWITCHES}},
    }


def _recorded(settings: Table) -> Table | None:
    """What was decided for a run that is there already, on whatever machine it began; None where there is none.

    What the arms of a comparison set themselves is not recorded for all of them; they set it again.
    """
    base, model = read_recipe(RECIPE), settings.get("config") or settings.get("model") or {}
    # A file has no options that are None.
    found = {**base, **base["model"], "aa": None, **settings.get("recipe", {}), **model}
    return {name: found[name] for name in (*OPTIONS, *SWITCHES)} if settings else None


def named_run(data: str, run: RunOptions, given: Mapping[str, Any]) -> RunOptions:
    """The run with a name; where none is given, of the data and of what was typed, so that no machine changes it."""
    if run.experiment is not None:
        return run
    typed = {"data": data, **given, **{name: getattr(run, name) for name in OF_RESULT}}
    digest = hashlib.sha256(json.dumps(typed, sort_keys=True).encode()).hexdigest()
    stem = re.sub(r"[^\w.-]+", "_", f"{RECIPE}-{Path(data).name}")
    return replace(run, experiment=f"{stem}-{digest[:8]}")
