"""Cost of a model: parameters, multiplications, memory and time by part, and the hours of a recipe on this device.

TARGET is a model's name with any switches, timm/NAME, a run folder or a checkpoint. Times are of this machine, now:
other programs on it make them longer.
"""

from __future__ import annotations

import json as json_format
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tyro

from fathoms.cli.flags.parse import Switches, given
from fathoms.errors import ConfigError, flag_of

if TYPE_CHECKING:
    from fathoms.evaluating.load import LoadedModel

EXAMPLES = """
fathoms cost vit_small_patch16_224
fathoms cost cait_s24_224 --batch-size 64 --recipe cait_400 --images 1281167
fathoms cost timm/swin_tiny_patch4_window7_224 --json
"""


IMAGES = 50_000
"""Training images of a recipe where --images does not say them: those of CIFAR."""


MOST_TIMES = 100


@dataclass(frozen=True)
class Args:
    """Model, batch and recipe."""

    target: tyro.conf.Positional[str | None] = None
    """A model's name, timm/NAME, a run folder, a checkpoint or a weights file. Default: vit_digits."""
    model: str | None = None
    """Name of the model, where TARGET is a weights file that does not say it."""
    batch_size: int = 128
    """Batch of the memory table."""
    measured_batch: int = 8
    """Images of the batch that is timed."""
    recipe: str | None = None
    """Expected hours of this recipe, a name or a TOML file."""
    images: int | None = None
    """Number of training images of that recipe. Default: 50000, those of CIFAR."""
    device: str = "auto"
    """auto, cpu or cuda."""
    json: bool = False
    """Print one JSON object."""
    switches: Switches = field(default_factory=Switches)


def run(args: Args) -> int:
    found = measure(args)
    print(json_format.dumps(found) if args.json else "\n".join(describe(found)))
    return 0


def check(args: Args) -> dict[str, Any] | None:
    """The recipe that is asked for, after a look at the other flags."""
    for name in ("batch_size", "measured_batch", "images"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{flag_of(name)} {value}: use 1 or more")
    if args.images is not None and args.recipe is None:
        raise ConfigError("--images would not be used: it goes with --recipe; add that")
    from fathoms.training.recipe import read_recipe

    return None if args.recipe is None else read_recipe(args.recipe)


def measure(args: Args, target: LoadedModel | None = None) -> dict[str, Any]:
    """Everything as plain values; `target` is the model where it is loaded already."""
    recipe = check(args)
    import torch

    from fathoms.cli.targets import load_target
    from fathoms.models.param_groups import state_bytes
    from fathoms.models.vit import ViT
    from fathoms.probes.part_costs import measure_cost, training_memory
    from fathoms.training.distributed import choose_device

    device = choose_device(args.device)
    target = target or load_target(args.target, args.model, given(args.switches))
    model = target.model.to(device)
    shape = (args.measured_batch, target.in_channels, target.image_size, target.image_size)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    plain = measure_cost(model, images)
    mixed = measure_cost(model, images, torch.bfloat16)
    count, state = int(plain.total("parameters")), state_bytes(model, "adamw")
    saved = {"fp32": plain.total("saved"), "autocast": mixed.total("saved"), "bf16": mixed.total("saved")}
    # The policy bf16 counts its copy of the weights by itself, and autocast makes none of them there.
    fixed = {"fp32": plain.total("fixed"), "autocast": mixed.total("fixed"), "bf16": plain.total("fixed")}
    found: dict[str, Any] = {
        "model": args.target or target.name,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": count,
        "multiplications": plain.total("multiplications"),
        "flop_count": model.flop_count() if isinstance(model, ViT) else None,
        "batch_size": args.batch_size,
        "parts": {name: vars(part) for name, part in plain.parts.items()},
        "saved_bytes": saved,
        "fixed_bytes": fixed,
        "training_bytes": {
            policy: training_memory(count, state, size, args.batch_size, policy, fixed=fixed[policy])
            for policy, size in saved.items()
        },
        "matrix_speed": plain.peak,
    }
    if recipe is not None:
        found["recipe"] = expected(args, recipe, target, device)
    return found


def expected(args: Args, table: dict[str, Any], target: Any, device: Any) -> dict[str, Any]:
    """Updates and hours of a recipe, from the measured time of its update as `fathoms train` would run it here."""
    import torch

    from fathoms.bench import Setting, prepare, race
    from fathoms.data.sampler import Sampler
    from fathoms.training.distributed import World
    from fathoms.training.job import Job
    from fathoms.training.recipe import Recipe, recipe_options
    from fathoms.training.speed import choose, machine_of

    # A teacher's forward passes are not counted.
    recipe = Recipe.join(
        recipe_options(table, str(args.recipe)), {"teacher": None, "distillation_type": "none"}
    )
    job = Job(None, target.name, target.config, recipe)
    images_an_epoch = IMAGES if args.images is None else args.images
    batch = min(recipe.batch_size, images_an_epoch)
    batches = Sampler(images_an_epoch, batch).batches
    epochs = recipe.total_epochs
    speed = choose(job, machine_of(World(0, 1, device)), epochs * batches).speed
    setting = Setting(speed.precision, speed.compile_scope if speed.compiles else "none", speed.launch)
    timed = batch if device.type == "cuda" else min(batch, args.measured_batch)
    size = (timed, target.in_channels, target.image_size, target.image_size)
    images = torch.randn(size, device=device)
    labels = torch.randint(0, max(target.num_classes, 1), (timed,), device=device)
    contender = prepare("model", target.model.train(), images, labels, "train", setting, recipe)
    rate = race([contender], timed, turns=3, steps=2)["model"]["images_per_second"]
    return {
        "name": args.recipe,
        "images": images_an_epoch,
        "epochs": epochs,
        "updates": epochs * math.ceil(batches / recipe.grad_accum_steps),
        "policy": speed.precision,
        "optimizer": recipe.opt,
        "timed_batch": timed,
        "images_per_second": rate,
        "hours": epochs * batches * batch / rate / 3600,
    }


def describe(found: dict[str, Any]) -> list[str]:
    from fathoms.text_table import aligned, wrapped

    totals = {
        name: sum(part[name] for part in found["parts"].values())
        for name in next(iter(found["parts"].values()))
    }

    def share(part: dict[str, Any], name: str, unit: float) -> str:
        value = f"{part[name] / unit:.3g}"
        return f"{value} {100 * part[name] / totals[name]:.0f} %" if totals[name] else value

    rows = []
    for name, part in found["parts"].items():
        times = part["seconds"] / part["floor"] if part["floor"] else math.inf
        rows.append(
            (
                name,
                share(part, "parameters", 1e6),
                share(part, "multiplications", 1e9),
                share(part, "saved", 2**20),
                share(part, "seconds", 1e-3),
                # What hardly multiplies has no floor to speak of.
                f"{times:.1f} x" if times < MOST_TIMES else "-",
            )
        )
    head = ("part", "parameters, M", "products, G", "saved, MiB", "forward, ms", "over floor")
    policies = ", ".join(f"{name} {size / 2**30:.3g} GiB" for name, size in found["training_bytes"].items())
    lines = [
        *wrapped(
            f"{found['model']}: {found['parameters'] / 1e6:.2f} M parameters, {found['multiplications'] / 1e9:.3g} G "
            f"multiplications an image; on {found['device']}"
        ),
        "",
        *aligned(head, rows).splitlines(),
        "",
        *wrapped(
            "products, saved, forward: multiplications, activations kept and time of one image in float32. The floor "
            "is the time of the multiplications at the speed of a large matrix product here, "
            f"{found['matrix_speed'] / 1e9:,.3g} G/s."
        ),
        "",
        *wrapped(f"training memory with AdamW, batch {found['batch_size']}: {policies}"),
    ]
    recipe = found.get("recipe")
    if recipe:
        how = f"{recipe['policy']}, {recipe['optimizer']}, measured in batches of {recipe['timed_batch']}"
        lines += wrapped(
            f"recipe {recipe['name']}: {recipe['updates']:,} updates ({recipe['epochs']:g} epochs of "
            f"{recipe['images']:,} images), {recipe['images_per_second']:,.0f} images/s ({how}): "
            f"{recipe['hours']:,.3g} hours, data and evaluation not counted"
        )
    return lines
