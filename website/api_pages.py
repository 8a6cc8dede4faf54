"""API reference, docs/api/*.md: a page for each room of public names, filled from docstrings when the site is built."""

from __future__ import annotations

import functools

import fathoms
from fathoms import parts

# Page, its title, and the names of `fathoms` on it, in the order of use.
TOP = {
    "models": (
        "Models and weights",
        "create_model list_models ViT ViTConfig load_weights save_weights param_groups",
    ),
    "surgery": ("Models you already have", "accelerate fold norms swap_norms"),
    "runs": (
        "Runs, probes and comparisons",
        "train Run compare Comparison evaluate predict export probe coordinate_check cost Costs judge load_run "
        "load_results FathomsError",
    ),
}


@functools.cache
def pages() -> dict[str, str]:
    """The text of every page of the reference, by its place on the site."""
    made = {}
    for name, (title, names) in TOP.items():
        homes = [f"{fathoms._HOMES.get(each, 'fathoms.errors')}.{each}" for each in names.split()]
        made[f"api/{name}.md"] = _page(title, "fathoms", homes)
    made["api/parts.md"] = _page("Parts", "fathoms.parts", part_homes())
    return made


def part_homes() -> list[str]:
    """The full path of every class and function of `fathoms.parts`; registries are on the pages of the families."""
    public = [getattr(parts, name) for name in parts.__all__]
    return [f"{value.__module__}.{value.__qualname__}" for value in public if hasattr(value, "__qualname__")]


def _page(title: str, room: str, homes: list[str]) -> str:
    letters = "B images, N tokens, D channels, H heads,\nK channels per head, L blocks, C classes"
    about = f"# {title}\n\nImport from `{room}`. Letters in shapes: {letters}.\n\n"
    return about + "\n".join(f"::: {path}\n" for path in homes)
