"""timm's side of a race: its model under each mode of torch.compile that people use, of which the quicker counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fathoms.bench.race import MODES, Contender, Setting, prepare

# As people run timm's models: compiled whole, under autocast; for inference in bfloat16 throughout. CUDA graphs are
# those of torch.compile's "reduce-overhead". Around timm's model an update is the same as around ours: its guard,
# optimizer and groups.
TIMM_SETTINGS = {
    "train": Setting("autocast", "model", "eager", "all"),
    "infer": Setting("bf16", "model", "eager", "all"),
}


def modes_of(setting: Setting, cuda: bool) -> list[Setting]:
    """A setting under each mode of torch.compile; one that replays CUDA graphs needs a GPU and a model compiled whole.

    Block by block such a graph finds the backward passes of other blocks waiting, and torch leaves its quick path.
    """
    if setting.compile != "model" or setting.launch == "graph" or not cuda:
        return [setting]
    return [replace(setting, mode=mode) for mode in MODES]


def prepare_modes(
    name: str,
    make: Callable[[], nn.Module],
    batch: tuple[Tensor, Tensor],
    mode: Literal["train", "infer"],
    setting: Setting,
) -> tuple[list[Contender], dict[str, str]]:
    """A contender for each mode, named "NAME, MODE", and why a mode could not run."""
    contenders: list[Contender] = []
    failed: dict[str, str] = {}
    for each in modes_of(setting, batch[0].is_cuda):
        try:
            contenders.append(prepare(label(name, each.mode), make(), *batch, mode, each))
        except (RuntimeError, torch.OutOfMemoryError) as error:
            if each.mode == "default":
                raise
            failed[each.mode] = " ".join(str(error).split())[:300]
    return contenders, failed


def label(name: str, mode: str) -> str:
    """The name of a contender under a mode."""
    return f"{name}, {mode}"


def quicker(rows: Mapping[str, dict[str, Any]], name: str, failed: Mapping[str, str]) -> dict[str, Any]:
    """The quickest of the rows of a contender, with its mode, and what each mode reached.

    >>> slow, quick = {"images_per_second": 1.0}, {"images_per_second": 2.0}
    >>> quicker({"timm, default": slow, "timm, reduce-overhead": quick}, "timm", {})["compile_mode"]
    'reduce-overhead'
    """
    own = {mode: rows[label(name, mode)] for mode in MODES if label(name, mode) in rows}
    best = max(own, key=lambda mode: own[mode]["images_per_second"])
    reached: dict[str, Any] = {mode: row["images_per_second"] for mode, row in own.items()}
    return {
        **own[best],
        "compile_mode": best,
        "modes": reached,
        **({"failed": dict(failed)} if failed else {}),
    }
