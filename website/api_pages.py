"""API reference, docs/api.md: public names in the order of use, filled from docstrings when the site is built."""

from __future__ import annotations

import inspect

import fathoms
from doc_format import table
from fathoms import parts

# Groups of `fathoms`' names.
TOP = {
    "Models and weights": "create_model list_models ViT ViTConfig load_weights save_weights param_groups",
    "Models you already have": "accelerate fold norms swap_norms",
    "Train, probe, compare, export": "train Run compare Comparison evaluate predict export probe coordinate_check "
    "cost Costs judge load_run load_results FathomsError",
}


def groups() -> dict[str, list[str]]:
    """The full path of every public name, by its group; of fathoms.parts by the file that a part is in."""
    found = {
        title: [f"{fathoms._HOMES.get(each, 'fathoms.errors')}.{each}" for each in names.split()]
        for title, names in TOP.items()
    }
    for name in parts.__all__:
        value = getattr(parts, name)
        # Registries are on the page of the switches.
        if hasattr(value, "__qualname__"):
            room = value.__module__.removeprefix("fathoms.parts.").split(".")[0].replace("_", " ")
            found.setdefault(f"Parts: {room}", []).append(f"{value.__module__}.{value.__qualname__}")
    return found


def pages() -> dict[str, str]:
    """The text of the page, by its file name under docs/."""
    lines = [
        "# Python API",
        "",
        "Import the first three groups from `fathoms`, the parts from `fathoms.parts`. Letters in shapes: B images, N",
        "tokens, D channels, H heads, K channels per head, L blocks, C classes. The site has signatures and sources.",
        "",
    ]
    for title, homes in groups().items():
        rows = [[f"`{home.rpartition('.')[2]}`", _first_line(home)] for home in homes]
        lines += [f"## {title}", "", table(["name", "does"], rows), "", *(f"::: {home}\n" for home in homes)]
    return {"api.md": "\n".join(lines)}


def _first_line(home: str) -> str:
    room, _, name = home.rpartition(".")
    text = inspect.getdoc(getattr(__import__(room, fromlist=[name]), name)) or ""
    return text.partition("\n")[0].replace("|", "\\|").replace("<", "&lt;")
