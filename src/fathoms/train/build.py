"""Build the data, model and learning-rate schedule of a job."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
from fathoms.data.sources.splits import Roles, open_roles, open_splits
from fathoms.data.tools.notices import notices
from fathoms.data.tools.trainable import check_trainable
from fathoms.errors import ConfigError
from fathoms.evaluate.load import weights_file
from fathoms.evaluate.loader import AnyLoader, check_crop, eval_loader
from fathoms.evaluate.preprocessing import Preprocessing
from fathoms.files.untrusted import read_toml
from fathoms.models.build_timm import build_timm, timm_size
from fathoms.models.vit import ViT
from fathoms.models.weights import load_weights
from fathoms.train.distributed import World
from fathoms.train.job import Job
from fathoms.train.optim.schedule import Schedule
from fathoms.train.recipe.recipe import Recipe


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
    return Data(loader, val, test, tuple(train.classes), roles.fingerprint(), roles, preprocessing, lines)


def _notices(job: Job, roles: Roles, loader: AnyLoader) -> list[str]:
    lines = notices(roles.whole())
    lines += [f"left out: split {name!r}, which plays no role beside the others" for name in roles.unused]
    batch = loader.sampler.batch_size
    if batch < job.recipe.batch_size:
        lines.append(
            f"--batch-size {job.recipe.batch_size} is cut to {batch}: there are {len(roles.train)} training images"
        )
    return lines


def eval_preprocessing(job: Job, size: int, source: Any) -> Preprocessing:
    """Preprocessing of evaluation, with the crop written out; a run that resumes keeps its crop."""
    given, table = Preprocessing.of(job.recipe.to_dict()), recorded_config(job)
    check_crop(given.crop_pct, source)
    if isinstance(source, ArraySource):
        return given.changed(crop_pct=1.0)
    if given.crop_pct is None and table is not None:
        kept = Preprocessing.recorded(job.recipe.to_dict(), table.get("preprocessing") or {})
        return given.changed(crop_pct=kept.crop_pct)
    return given.at(size)


def recorded_config(job: Job) -> dict[str, Any] | None:
    """The config.toml of the run that a job resumes, empty where it is missing; None for a new run."""
    config, checkpoints = job.folder / "config.toml", job.folder / "checkpoints"
    if config.is_symlink():
        # A run folder with links is refused when it is opened, with the reason.
        return None
    if config.is_file():
        return read_toml(config, ConfigError)
    return {} if any(checkpoints.glob("*/state.json")) else None


def open_data(job: Job) -> Roles:
    """The data of a job by its roles; a run that began before there were roles keeps its two splits."""
    table = recorded_config(job)
    if table is None or "roles" in table:
        return open_roles(job.data, job.recipe.val_share)
    return Roles(*open_splits(job.data), None)


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
    crop = CropOptions(
        crop=recipe.crop,
        scale=recipe.scale,
        ratio=recipe.ratio,
        crop_padding=recipe.crop_padding,
        hflip=recipe.hflip,
        train_interpolation=recipe.train_interpolation,
    )
    if isinstance(source, ArraySource):
        return DeviceLoader(source, sampler, size, crop, augment, world.device, grey=sees_grey(job))
    where = "device" if world.device.type == "cuda" else "worker"
    transform = TrainTransform(size, crop, seed, where)
    workers = LoaderOptions(
        job.run.workers, job.run.worker_kind, max_bad=job.run.max_bad, grey=sees_grey(job)
    )
    return Loader(source, sampler, transform, augment, workers, world.device)


def augment_options(recipe: Recipe) -> AugmentOptions:
    """The augmentation of a recipe."""
    mix = MixOptions(
        mixup=recipe.mixup,
        cutmix=recipe.cutmix,
        mixup_prob=recipe.mixup_prob,
        mixup_switch_prob=recipe.mixup_switch_prob,
        mixup_mode=recipe.mixup_mode,
        smoothing=recipe.smoothing,
    )
    return AugmentOptions(
        aa=recipe.aa,
        color_jitter=recipe.color_jitter,
        reprob=recipe.reprob,
        remode=recipe.remode,
        recount=recipe.recount,
        mix=mix,
        train_interpolation=recipe.train_interpolation,
        mean=recipe.mean,
        std=recipe.std,
    )


def build_model(job: Job, classes: int) -> nn.Module:
    """The model to train: built, norms swapped (--swap-norms), weights loaded, parameters frozen (--freeze)."""
    torch.manual_seed(job.run.seed)
    model: nn.Module
    if job.config is not None:
        model = ViT(job.config.replace(num_classes=classes))
        model.set_grad_checkpointing(job.recipe.grad_checkpointing)
    else:
        model = build_timm(job.model, classes, job.recipe.grad_checkpointing)
    if job.run.swap_norms is not None:
        from fathoms.surgery.swap.swap import swap_norms

        swap_norms(model, job.run.swap_norms, how="reset")
    if job.run.initial_checkpoint is not None:
        if not isinstance(model, ViT):
            raise ConfigError(
                "--initial-checkpoint: weights can be loaded into fathoms models only; leave it out"
            )
        skip = ["head*"] if job.run.initial_head == "new" else []
        source = job.run.initial_checkpoint
        load_weights(
            model, weights_file(Path(source), ema=True) if Path(source).is_dir() else source, skip=skip
        )
    freeze(model, job.recipe.freeze)
    return model


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
    """The learning-rate schedule of a job."""
    recipe = job.recipe
    names = ("epochs", "min_lr", "warmup_lr", "warmup_epochs", "warmup_prefix", "cooldown_epochs")
    names += ("decay_epochs", "decay_rate", "epoch_factor", "epoch_threshold", "sched_on_updates")
    return Schedule(recipe.sched, recipe.lr, **{name: getattr(recipe, name) for name in names})
