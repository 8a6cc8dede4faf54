"""The page of a probe: the verdict, the pictures and every number, in the style of the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fathoms.files import write_atomic
from fathoms.probes import probe_figures as draw
from fathoms.probes.attention_maps import attention_by_head, shown_pixels
from fathoms.probes.blocks import head_mixing, patch_filters, pixel_scales, residual_scales
from fathoms.report.html import embedded_figure, fill

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Picture = tuple[Any, list["Figure"]]
"""Numbers, and the figures of them: for a wide screen, and where there is another one for a phone."""


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
    pictures = _pictures(model, image, found, rows)
    written = [
        name
        for key, (data, made) in pictures.items()
        for name in draw.save_picture(made[0], data, folder, key)
    ]
    page = folder / draw.PAGE
    write_atomic(page, render_probe(found, pictures, words).encode(errors="replace"))
    return [*written, str(page)]


def _pictures(
    model: nn.Module, image: Tensor, found: dict[str, Any], rows: Sequence[dict[str, Any]]
) -> dict[str, Picture]:
    def profile(sites: draw.Sites, title: str) -> Picture:
        return draw.profile_data(sites), [
            draw.profile_figure({"": sites}, title, columns) for columns in (2, 1)
        ]

    made: dict[str, Picture] = {"depth": profile(found["sites"], "Signal and gradient by depth")}
    if (steps := found.get("steps")) is not None:
        title = f"After {len(steps['losses'])} steps at lr {steps['lr']:g}"
        made["depth_after_steps"] = profile(steps["sites"], title)
    if measured := draw.trajectory(rows):
        made["training"] = measured, [draw.trajectory_figure(measured, columns) for columns in (2, 1)]
    if scales := residual_scales(model):
        made["scales"] = scales, [draw.scale_figure(scales)]
    if channels := pixel_scales(model):
        made["pixel_scale"] = channels, [draw.pixel_scale_figure(channels)]
    if (filters := patch_filters(model)) is not None:
        made["filters"] = filters, [draw.filter_figure(filters)]
    if maps := attention_by_head(model, image):
        shown = {name: one.double().cpu().numpy() for name, one in maps.items()}
        data = {name: one.tolist() for name, one in shown.items()}
        made["attention"] = data, [draw.attention_figure(shown, shown_pixels(image))]
    if matrices := head_mixing(model):
        made["head_mixing"] = matrices, [draw.mixing_figure(matrices)]
    return made


def render_probe(found: dict[str, Any], pictures: dict[str, Picture], words: Sequence[str]) -> str:
    columns = [name for name in found["sites"][0] if any(site[name] is not None for site in found["sites"])]
    outcome = (found.get("drift") or {}).get("outcome") if found["trained"] else found["start"]["outcome"]
    return fill(
        "probe.html",
        styles=("page.css", "probe.css"),
        scripts=("shared.js",),
        data={},
        images=True,
        name=str(found["model"]),
        outcome=outcome or "measured",
        good=outcome in ("trains", "steady"),
        words=list(words),
        found=found,
        drawn={name: embedded_figure(name, *made) for name, (_, made) in pictures.items()},
        columns=columns,
    )
