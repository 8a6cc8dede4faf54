"""Checks of paths and values that need no torch, made before it is imported: a typo is refused in a second."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fathoms.errors import ConfigError, WeightsError, flag_of
from fathoms.files import missing
from fathoms.machine import check_device
from fathoms.models import model_sources
from fathoms.models.build_timm import TIMM
from fathoms.models.model_sources import resolve_trained, resolve_weights
from fathoms.models.zoo import ALIASES, MODELS
from fathoms.registry import check_name
from fathoms.training.job import RunOptions, teacher_kind

HUB_DATA = "hfds/"
"""Prefix of data sets of the Hub."""
NO_PATH = ("digits",)
"""Names of data sets that are built in."""


def check_counts(args: object, names: Iterable[str], least: int = 1) -> None:
    """Refuse a count below its least."""
    for name in names:
        if getattr(args, name) < least:
            raise ConfigError(f"{flag_of(name)} {getattr(args, name)}: use {least} or more")


def check_data(path: str | Path | None, where: str = "", otherwise: str = "check the path") -> None:
    """Refuse a data set, or another input, whose path does not exist; the built-in digits are None."""
    text = "" if path is None else str(path)
    if path is None or text.startswith(HUB_DATA) or text in NO_PATH:
        return
    if not os.path.exists(text):  # noqa: PTH110 - unlike Path.exists, false for a name too long to exist
        raise ConfigError(f"{where} {missing(text, otherwise)}".lstrip())


def named_data(data: str) -> str:
    """A data set as typed: a path that has the name of a built-in one wins, and is called ./NAME from then on."""
    return f"./{data}" if data in NO_PATH and Path(data).exists() else data


def path_or_digits(data: str | None) -> str | None:
    """The path of a data set; None for the built-in digits, also by their name where no path has it."""
    named = None if data is None else named_data(data)
    return None if named in NO_PATH else named


def check_report_folders(folders: Sequence[str]) -> None:
    """Refuse to make a page of nothing, or of folders that do not exist."""
    if not folders:
        raise ConfigError("no folder is given; give a run folder or a comparison")
    for folder in folders:
        check_data(folder, otherwise="give a run folder or a comparison")


def check_trained(
    checkpoint: str, model: str | None = None, device: str = "auto", where: str = "--checkpoint"
) -> str:
    """The name of a trained model that exists; a repository of the Hub is fetched, and named with its commit."""
    check_device(device)
    if model is not None and not model.startswith(TIMM):
        check_name(model, [*MODELS, *ALIASES], "model", "--model")
    named = resolve_trained(checkpoint, where)
    return model_sources.fetch(named.text)[1] if named.kind == "hub" else checkpoint


@contextmanager
def without_switches() -> Iterator[None]:
    """Let a misfit between weights and model name no flags that this command does not have."""
    from fathoms.models.weights import MisfitError

    try:
        yield
    except MisfitError as error:
        raise WeightsError(error.plain or str(error)) from error


def check_run(run: RunOptions, data: str | None, teacher: str | None) -> None:
    """Refuse a run whose data, teacher, initial weights or output folder are not there."""
    check_data(data)
    if teacher is not None:
        teacher_kind(teacher)
    if run.initial_checkpoint is not None:
        resolve_weights(run.initial_checkpoint, "--initial-checkpoint")
    check_folder("--output", Path(run.output))


def check_folder(flag: str, folder: Path) -> None:
    """Refuse a folder that cannot be made, since a file has its name or that of a folder above it."""
    nearest = next((place for place in (folder, *folder.parents) if os.path.lexists(place)), folder)
    if not nearest.is_dir():
        raise ConfigError(f"{flag} {folder}: {nearest} is a file, not a folder; give another folder")
