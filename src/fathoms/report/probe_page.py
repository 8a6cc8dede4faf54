"""The page of a probe: the verdict, the pictures and every number, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from torch import Tensor, nn

from fathoms.drawing.picture import Picture
from fathoms.files.atomic import write_atomic
from fathoms.probes.pictures.attention import attention_picture, shown_pixels
from fathoms.probes.pictures.depth_profile import depth_profile
from fathoms.probes.pictures.names import OF_A_MODEL, PAGE, picture_files
from fathoms.probes.pictures.over_time import trajectory_picture
from fathoms.probes.pictures.weights import filter_picture, mixing_picture, pixel_scale_picture, scale_picture
from fathoms.report.html import fill


def write_probe_page(
    folder: Path,
    model: nn.Module,
    image: Tensor,
    found: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    words: Sequence[str],
) -> list[str]:
    """Write every picture that this model has, as SVG, PNG and JSON, and the page; the names of what was written.

    Args:
        folder: Where to; it is made.
        model: The model.
        image: One image as the model takes it, for the attention.
        found: What `fathoms probe --json` prints.
        rows: The run's probe.jsonl, empty without a run.
        words: The verdict.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = {name: made for name, made in _pictures(model, image, found, rows).items() if made is not None}
    written = [
        str(made.save(path)) for name, made in pictures.items() for path in picture_files(folder, [name])
    ]
    page = folder / PAGE
    write_atomic(page, render_probe(found, pictures, words).encode(errors="replace"))
    return [*written, str(page)]


def _pictures(
    model: nn.Module, image: Tensor, found: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> dict[str, Picture | None]:
    steps = found.get("steps")
    made = (
        depth_profile({"": found["sites"]}, "Signal and gradient by depth"),
        None
        if steps is None
        else depth_profile({"": steps["sites"]}, f"After {len(steps['losses'])} steps at lr {steps['lr']:g}"),
        trajectory_picture(rows),
        scale_picture(model),
        pixel_scale_picture(model),
        filter_picture(model),
        attention_picture(model, image, shown_pixels(image)),
        mixing_picture(model),
    )
    return dict(zip(OF_A_MODEL, made, strict=True))


def render_probe(found: dict[str, Any], pictures: dict[str, Picture], words: Sequence[str]) -> str:
    """The page as HTML. Pictures of lines are in it; those with pixels are linked, since a page loads no images."""
    drawn = {name: Markup(made.svg()) for name, made in pictures.items() if not made.has_pixels}
    linked = [name for name in pictures if name not in drawn]
    columns = [name for name in found["sites"][0] if any(site[name] is not None for site in found["sites"])]
    outcome = (found.get("drift") or {}).get("outcome") if found["trained"] else found["start"]["outcome"]
    return fill(
        "probe.html",
        styles=("page.css", "probe.css"),
        scripts=("live.js",),
        data={},
        live=False,
        name=str(found["model"]),
        outcome=outcome or "measured",
        good=outcome in ("trains", "steady"),
        words=list(words),
        found=found,
        drawn=drawn,
        linked=linked,
        columns=columns,
    )
