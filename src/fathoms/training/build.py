"""Build the data, model and learning-rate schedule of a job."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from fathoms.data import (
    ArraySource,
    Augment,
    AugmentOptions,
    CropOptions,
    DeviceLoader,
    Loader,
    LoaderOptions,
    MixOptions,
    Sampler,
    TrainTransform,
    choose_backend,
)
from fathoms.data.augment.policies import jitters_beside
from fathoms.data.readiness import check_trainable, median_side, notices
from fathoms.data.sources.splits import Roles, open_roles
from fathoms.errors import ConfigError, reason
from fathoms.evaluating.load import found
from fathoms.evaluating.preprocessing import AnyLoader, Preprocessing, check_crop, eval_loader
from fathoms.models.build_timm import build_timm, timm_size
from fathoms.models.model_sources import resolve_weights
from fathoms.models.vit import ViT
from fathoms.models.weights import load_weights
from fathoms.models.zoo import data_config
from fathoms.parts.modes import in_inference
from fathoms.training.distributed import World
from fathoms.training.job import Job, start_preprocessing
from fathoms.training.optimization import Schedule
from fathoms.training.recipe import RECIPE_FIELDS, Recipe


@dataclass(frozen=True)
class Data:
    """The splits of a data set by their roles, as loaders; val or test may be None."""

    train: AnyLoader
    val: AnyLoader | None
    test: AnyLoader | None
    classes: tuple[str, ...]
    fingerprint: str
    roles: Roles
    preprocessing: Preprocessing
    notices: tuple[str, ...] = ()
    """Notices about the data for the user, one line each."""


def model_image_size(job: Job) -> int:
    """The image size that the model of a job is built for."""
    if job.module is not None:
        return job.module.image_size
    return timm_size(job.model) if job.config is None else job.config.image_size


def sees_grey(job: Job) -> bool:
    """Whether the model has one channel, and so sees colours as grey."""
    return job.config is not None and job.config.in_channels == 1


def build_data(job: Job, world: World, roles: Roles | None = None) -> Data:
    """Open the data, unless `roles` are open already, and check that every class has images in every split."""
    roles, size = roles or open_data(job), model_image_size(job)
    train = roles.train
    check_trainable(job.data, roles)
    preprocessing = eval_preprocessing(job, size, train)
    val, test = (
        None
        if split is None
        else eval_loader(
            split,
            size,
            job.recipe.batch_size,
            preprocessing,
            options=LoaderOptions(job.run.workers, max_bad=job.run.max_bad, grey=sees_grey(job)),
            device=world.device,
            share=(world.rank, world.size),
        )
        for split in (roles.val, roles.test)
    )
    loader = train_loader(job, train, size, world)
    lines = tuple(_notices(job, roles, loader)) if world.is_main else ()
    start = (str(job.run.initial_checkpoint), start_preprocessing(job.run))
    lines = (preprocessing.described(job.model, isinstance(train, ArraySource), start), *lines)
    return Data(loader, val, test, tuple(train.classes), roles.fingerprint(), roles, preprocessing, lines)


def _notices(job: Job, roles: Roles, loader: AnyLoader) -> list[str]:
    lines = notices(roles.whole())
    side, wanted = median_side(roles.train), model_image_size(job)
    if 0 < side < 0.75 * wanted:
        lines.append(
            f"images are enlarged: half of them have a side of {side} pixels or fewer, the model takes {wanted}; "
            "see --image-size"
        )
    lines += [f"left out: split {name!r}, which plays no role beside the others" for name in roles.unused]
    if job.recipe.color_jitter and not jitters_beside(job.recipe.aa):
        lines.append(
            f"--color-jitter {job.recipe.color_jitter:g} has no effect beside --aa {job.recipe.aa}, as in timm"
        )
    batch = loader.sampler.batch_size
    if batch < job.recipe.batch_size:
        lines.append(
            f"--batch-size {job.recipe.batch_size} is cut to {batch}: there are {len(roles.train)} training images"
        )
    return lines


def eval_preprocessing(job: Job, size: int, source: Any) -> Preprocessing:
    """Preprocessing of evaluation, with the crop written out: the recipe's, else the start's, else the model's own."""
    given = Preprocessing.of(job.recipe.to_dict())
    check_crop(given.crop_pct, source)
    if isinstance(source, ArraySource):
        return given.changed(crop_pct=1.0)
    if given.crop_pct is None:
        given = given.changed(
            crop_pct={**data_config(job.model), **start_preprocessing(job.run)}.get("crop_pct")
        )
    return given.at(size)


def open_data(job: Job) -> Roles:
    return open_roles(job.data, job.recipe.val_share)


def train_loader(job: Job, source: Any, size: int, world: World) -> AnyLoader:
    """The loader of the training split, in the run's order, with the recipe's crops and augmentation."""
    recipe, seed = job.recipe, job.run.seed
    share = {"world": world.size, "rank": world.rank}
    # A batch larger than the data is cut to the data, with a line; see `_notices`.
    batch = min(recipe.batch_size, max(1, len(source) // world.size))
    sampler = Sampler(len(source), batch, seed, aug_repeats=recipe.aug_repeats, **share)
    options = augment_options(recipe)
    backend = choose_backend("auto", world.device)
    augment = Augment(options, seed=seed, classes=len(source.classes), device=world.device, backend=backend)
    crop = CropOptions(**own_fields(CropOptions, recipe))
    if isinstance(source, ArraySource):
        return DeviceLoader(source, sampler, size, crop, augment, world.device, grey=sees_grey(job))
    where = "device" if backend.name == "triton" else "worker"
    transform = TrainTransform(size, crop, seed, where)
    workers = LoaderOptions(
        job.run.workers, job.run.worker_kind, max_bad=job.run.max_bad, grey=sees_grey(job)
    )
    return Loader(source, sampler, transform, augment, workers, world.device)


def augment_options(recipe: Recipe) -> AugmentOptions:
    """The augmentation of a recipe, with the mean and standard deviation of its preprocessing."""
    pixels = Preprocessing.of(recipe.to_dict())
    options = own_fields(AugmentOptions, recipe) | {"mean": pixels.mean, "std": pixels.std}
    return AugmentOptions(**options, mix=MixOptions(**own_fields(MixOptions, recipe)))


def own_fields(options: type, recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe that are fields of one of its groups, which has the same names."""
    return {each.name: getattr(recipe, each.name) for each in fields(options) if each.name in RECIPE_FIELDS}


def build_model(
    job: Job,
    classes: int,
    said: list[str] | None = None,
    module: nn.Module | None = None,
    names: Sequence[str] | None = None,
) -> nn.Module:
    """The model to train, built or given: norms swapped, weights loaded, parameters frozen as the flags say.

    Args:
        job: The run.
        classes: Number of outputs.
        said: Gets a line on the norms that were swapped, and those that stay.
        module: The model, where it is given; None builds it.
        names: The data's classes, which those of an --initial-checkpoint must be; None does not compare them.
    """
    torch.manual_seed(job.run.seed)
    model: nn.Module
    if module is not None:
        _check_module(module, model_image_size(job), classes)
        model = module
    elif job.config is not None:
        model = ViT(job.config.replace(num_classes=classes))
        model.set_grad_checkpointing(job.recipe.grad_checkpointing)
    else:
        model = build_timm(job.model, classes, job.recipe.grad_checkpointing)
    if job.run.swap_norms is not None:
        from fathoms.surgery.swap import swap_norms

        report = swap_norms(model, job.run.swap_norms, how="reset")
        if said is not None:
            said.append(f"--swap-norms {job.run.swap_norms}: {report.line()}")
    if job.run.initial_checkpoint is not None:
        if not isinstance(model, ViT):
            raise ConfigError(
                "--initial-checkpoint: weights can be loaded into fathoms models only; leave it out"
            )
        _start(model, job, names)
    freeze(model, job.recipe.freeze)
    return model


def _check_module(module: nn.Module, size: int, classes: int) -> None:
    """Refuse a module that gives no logits of the data's classes, before anything is trained."""
    like = next(module.parameters(), None)
    if like is None or like.dtype != torch.float32:
        kind = "no parameters" if like is None else f"parameters of {str(like.dtype).removeprefix('torch.')}"
        raise ConfigError(f"{type(module).__name__}: has {kind}; training wants float32, see precision=")
    shape = (2, 3, size, size)
    try:
        with in_inference(module), torch.no_grad():
            logits = module(torch.zeros(shape, device=like.device))
    except Exception as error:
        raise ConfigError(
            f"{type(module).__name__}: fails on images of shape {shape} ({reason(error)})"
        ) from error
    if not isinstance(logits, Tensor) or logits.shape != (2, classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"{type(module).__name__}: gives {found} for 2 images, not the logits of {classes} classes, (2, {classes})"
        )


def _start(model: ViT, job: Job, names: Sequence[str] | None) -> None:
    """Load the weights that a run starts from (--initial-checkpoint), after comparing their record with the run."""
    source, new_head = str(job.run.initial_checkpoint), job.run.initial_head == "new"
    with found(resolve_weights(source, "--initial-checkpoint").text) as start:
        # After a swap the model's own config names the new norm.
        start.record.check_start(job.model, job.config or model.config, job.run.swap_norms, source)
        classes = start.record.classes
        if not new_head and classes and names and classes != tuple(names):
            other = next((pair for pair in zip(classes, names, strict=False) if pair[0] != pair[1]), None)
            said = (
                f"{other[0]!r} in the place of {other[1]!r}"
                if other
                else f"{len(classes)} instead of {len(names)}"
            )
            raise ConfigError(
                f"--initial-checkpoint: {source} has other classes than the data, {said}; give --initial-head new"
            )
        load_weights(model, start.weights, skip=["head*"] if new_head else [])


def module_hash(module: nn.Module) -> str:
    """A hash of a module: its weights, which of them train, its attributes, and the code of its classes."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    # Functions are printed with an address, which is another one in every process.
    printed = re.sub(r" at 0x[0-9a-f]+", "", repr(module))
    # torch keeps its own under names that begin with an underscore.
    parts = [
        [
            (key, _told(value))
            for key, value in sorted(vars(part).items())
            if key[0] != "_" and key != "training"
        ]
        for part in module.modules()
    ]
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    own = sorted(
        (kind.__qualname__, sorted((key, _told(value)) for key, value in vars(kind).items()))
        for kind in kinds
        if kind.__module__.partition(".")[0] not in ("torch", "builtins")
    )
    digest.update(repr((frozen, printed, parts, own)).encode())
    return digest.hexdigest()


def _told(value: Any, depth: int = 4) -> str:
    """What a value is, alike in every process: a plain value itself, a function by its code, others by their type."""
    if isinstance(value, str | bytes | int | float | complex | torch.dtype | torch.device | None):
        return repr(value)
    if depth and isinstance(value, list | tuple):
        return f"{[_told(each, depth - 1) for each in value]}"
    if depth and isinstance(value, set | frozenset):
        return f"{sorted(_told(each, depth - 1) for each in value)}"
    if depth and isinstance(value, Mapping):
        return f"{[(_told(key, depth - 1), _told(each, depth - 1)) for key, each in value.items()]}"
    if isinstance(value, functools.partial):
        return _told((value.func, value.args, value.keywords), depth)
    if isinstance(value, types.CodeType):
        return f"{value.co_code!r} {value.co_names} {_told(value.co_consts, depth)}"
    value = getattr(value, "__func__", value)
    if depth and isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return _told((value.__code__, value.__defaults__, value.__kwdefaults__, cells), depth - 1)
    return f"{type(value).__qualname__} {getattr(value, '__qualname__', '')}"


def freeze(model: nn.Module, patterns: str | None) -> None:
    """Freeze the parameters whose names match; a pattern without a match is an error."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns.split(",") if patterns else []:
        found = set(fnmatch.filter(names, pattern.strip()))
        if not found:
            raise ConfigError(
                f"--freeze: {pattern.strip()!r} matches no parameter; see the names in `fathoms probe`"
            )
        for name, parameter in model.named_parameters():
            if name in found:
                parameter.requires_grad_(False)


def build_schedule(job: Job) -> Schedule:
    return Schedule(job.recipe)
