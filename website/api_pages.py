"""API reference, docs/api/*.md: a page for each room of public names, filled from docstrings when the site is built."""

from __future__ import annotations

import functools

# Page, its title, and the names of `fathoms` on it, in the order of use.
TOP = {
    "models": (
        "Models and weights",
        ("create_model", "list_models", "ViT", "ViTConfig", "load_weights", "save_weights", "param_groups"),
    ),
    "surgery": ("Models you already have", ("accelerate", "fold", "swap_norms", "taper")),
    "runs": ("Runs, probes and comparisons", ("load_run", "load_results", "probe", "FathomsError")),
}


@functools.cache
def pages() -> dict[str, str]:
    """The text of every page of the reference, by its place on the site."""
    made = {}
    for name, (title, names) in TOP.items():
        made[f"api/{name}.md"] = _page(title, "fathoms", {each: home(each) for each in names})
    made["api/parts.md"] = _page("Parts", "fathoms.parts", part_homes())
    return made


def home(name: str) -> str:
    """The full path of a public name of `fathoms`."""
    import fathoms

    module = fathoms._HOMES.get(name, "fathoms.errors")
    return f"{module}.{name}"


def part_homes() -> dict[str, str]:
    """The full path of every class and function of `fathoms.parts`; registries are on the pages of the families."""
    from fathoms import parts

    public = {name: getattr(parts, name) for name in parts.__all__}
    return {
        name: f"{value.__module__}.{value.__qualname__}"
        for name, value in public.items()
        if hasattr(value, "__qualname__")
    }


def _page(title: str, room: str, names: dict[str, str]) -> str:
    lines = [
        f"# {title}",
        "",
        f"Import from `{room}`. Letters in shapes: B images, N tokens, D channels, H heads,",
    ]
    lines += ["K channels per head, L blocks, C classes.", ""]
    for path in names.values():
        lines += [f"::: {path}", ""]
    return "\n".join(lines)
