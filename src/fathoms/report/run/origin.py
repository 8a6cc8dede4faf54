"""The origin of a run: its model in words, command, start, commits and machine."""

from __future__ import annotations

import shlex
from typing import Any

from fathoms.errors import FathomsError
from fathoms.models.zoo import model_config
from fathoms.report.quantities import clipped, file_size, shown
from fathoms.report.run.files import RunRecord, listed, number, table
from fathoms.text_table import plural

# Set by the data and the recipe, not part of what a name stands for.
FREE = ("num_classes", "in_channels", "image_size", "drop_path", "drop_path_schedule")

SHOWN = (
    "commit",
    "project_commit",
    "processor",
    "cores",
    "threads",
    "memory",
    "gpu",
    "gpu_memory",
    "version",
)
"""Entries of environment.json that `origin` shows."""


def model_words(run: RunRecord) -> str:
    """The model in words: its own name if it is what the name stands for, else its shape.

    A model that was begun from a name and given other widths is not the model of that name.
    """
    model = table(run.config.get("model"))
    name, depth, dim = str(model.get("name", "")), number(model.get("depth")), number(model.get("dim"))
    changed = changed_fields(model)
    if not changed or depth is None or dim is None:
        return name
    parts = [f"{depth:g} blocks of {dim:g} channels"]
    parts += [f"{word} {shown(model[key])}" for key, word in (("patch_size", "patch"),) if key in model]
    return ", ".join(parts)


def changed_fields(model: dict[str, Any]) -> list[str]:
    """Fields in which a model differs from the one that its name stands for."""
    try:
        named = model_config(str(model.get("name", ""))).to_dict()
    except FathomsError:
        return []
    return [
        key
        for key, value in named.items()
        if key not in FREE and key in model and shown(model[key]) != shown(value)
    ]


def command(run: RunRecord) -> str:
    """The command that started the run, quoted for a shell; empty where code did."""
    words = [str(word) for word in listed(_first_start(run).get("command"))]
    return clipped(shlex.join(words), 4000) if words else ""


def origin(run: RunRecord) -> list[tuple[str, str]]:
    """Start, host, commits, device and memory, as far as they are recorded."""
    environment, start = run.environment, _first_start(run)
    starts = [table(one) for one in listed(environment.get("starts"))]
    rows = [("started", _time(start)), ("host", start.get("host")), ("folder", start.get("folder"))]
    if len(starts) > 1:
        rows.append(("resumed", f"{plural(len(starts) - 1, 'time')}, last {_time(starts[-1])}"))
    gpu = environment.get("gpu")
    if (memory := number(environment.get("gpu_memory"))) is not None and gpu:
        gpu = f"{gpu}, {file_size(memory)}"
    rows += [("GPU", gpu), ("processor", environment.get("processor"))]
    if (threads := number(environment.get("threads"))) is not None:
        rows.append(("threads", f"{threads:g} on {number(environment.get('cores'), 0):g} cores"))
    if (memory := number(environment.get("memory"))) is not None:
        rows.append(("memory of the machine", file_size(memory)))
    rows += [
        ("commit of fathoms", environment.get("commit")),
        ("commit of the working folder", environment.get("project_commit")),
    ]
    if changed := changed_fields(table(run.config.get("model"))):
        rows.append((f"differs from {table(run.config.get('model')).get('name')} in", ", ".join(changed)))
    return [(clipped(name, 80), clipped(shown(value), 300)) for name, value in rows if value]


def _first_start(run: RunRecord) -> dict[str, Any]:
    return table(next(iter(listed(run.environment.get("starts"))), None))


def _time(start: dict[str, Any]) -> str:
    return str(start.get("time", "")).replace("T", " ").replace("+00:00", " UTC")
