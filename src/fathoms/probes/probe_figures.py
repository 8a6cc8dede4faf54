"""Figures of what a probe measures: each function takes plain numbers and returns a matplotlib figure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fathoms.files import write_atomic
from fathoms.plotting.panels import Line, NumberMap, Panel, line_panels, map_grid
from fathoms.plotting.style import INK, PALETTE, colour_map, new_figure, printed, save_figure, styled
from fathoms.probes.blocks import main_stack
from fathoms.probes.thresholds import THRESHOLDS, depth_features

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sites = Sequence[dict[str, Any]]

ENDINGS = (".svg", ".png", ".json")
PAGE = "probe.html"
OF_A_MODEL = (
    "depth",
    "depth_after_steps",
    "training",
    "scales",
    "pixel_scale",
    "filters",
    "attention",
    "head_mixing",
)
"""Pictures of one model that `fathoms probe --figures` writes; those that it does not have are left out."""
COLUMNS = ("stream", "ratio", "gradient_rms", "weights_rms", "entropy", "token_cosine")
"""Numbers of a site that `profile_figure` draws."""
_TITLES = (
    "Stream (RMS)",
    "Branch over stream",
    "Gradient on the stream (RMS)",
    "Gradient of the weights (RMS)",
    "Attention entropy over its maximum",
    "Cosine between tokens",
)
_LIMITS = {
    "ratio": (THRESHOLDS.silent_ratio, "silent below"),
    "entropy": (THRESHOLDS.entropy, "saturated below"),
    "token_cosine": (THRESHOLDS.token_cosine, "alike above"),
}
_SHOWN_HEADS, _SHOWN_BLOCKS = 8, 3


def picture_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """The files of pictures: each as SVG, PNG and its numbers as JSON."""
    return [folder / f"{name}{ending}" for name in names for ending in ENDINGS]


def save_picture(figure: Figure, data: Any, folder: Path, name: str) -> list[str]:
    """Write a picture as SVG and PNG and its numbers as JSON; the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    svg, png, numbers = picture_files(folder, [name])
    for path in (svg, png):
        save_figure(figure, path)
    write_atomic(numbers, json.dumps(data).encode() + b"\n")
    return [str(path) for path in (svg, png, numbers)]


def profile_data(sites: Sites) -> dict[str, Any]:
    """The numbers of `profile_figure` for one model."""
    return {"": [{key: site.get(key) for key in ("block", "branch", *COLUMNS)} for site in sites]}


def profile_figure(
    models: Mapping[str, Sites], title: str = "Signal and gradient by depth", columns: int = 2
) -> Figure:
    """Six numbers against the block, for each named model; attention and MLP apart where there is one model."""
    panels = []
    for column, name in zip(COLUMNS, _TITLES, strict=True):
        lines: list[Line] = []
        for index, (label, sites) in enumerate(models.items()):
            lines += _lines(label, index, sites, column, alone=len(models) == 1)
        log = column not in ("entropy", "token_cosine")
        limit = _LIMITS.get(column)
        panels.append(Panel(name, "block", lines, log, y_range=None if log else _unit(lines), limit=limit))
    return line_panels(panels, title, columns)


def _lines(label: str, index: int, sites: Sites, column: str, alone: bool) -> list[Line]:
    places = {name: place for place, name in enumerate(dict.fromkeys(site["block"] for site in sites))}
    if not alone:
        last = {s["block"]: s.get(column) for s in sites if s.get(column) is not None}
        return [Line(label, _broken(last, places), index, index // 7)]
    lines = []
    for place, branch in enumerate(dict.fromkeys(site["branch"] for site in sites)):
        values = {s["block"]: s.get(column) for s in sites if s["branch"] == branch}
        if any(value is not None for value in values.values()):
            lines.append(Line(branch, _broken(values, places), place, int(branch != "attn")))
    return lines


def _broken(values: dict[str, float | None], places: dict[str, int]) -> list[tuple[float, float | None]]:
    """Points by block; a line ends where another stack of blocks begins, such as class attention."""
    stack = main_stack(list(places))
    points: list[tuple[float, float | None]] = []
    before = None
    for block, value in values.items():
        if before is not None and (before in stack) != (block in stack):
            points.append((places[block], None))
        points.append((places[block], value))
        before = block
    return points


def _unit(lines: Sequence[Line]) -> tuple[float, float]:
    """From zero to one, and below zero where a cosine is."""
    low = min((y for line in lines for _, y in line.points if y is not None), default=0.0)
    return (-1.0 if low < 0 else 0.0, 1.02)


_WATCHED = (
    ("stream_max", "Largest stream (RMS)", True),
    ("ratio_median", "Branch over stream, median", True),
    ("gradient_factor", "Gradient factor per block", True),
    ("logit", "Largest attention logit", True),
    ("entropy_mean", "Attention entropy over its maximum", False),
    ("token_cosine", "Cosine between tokens, last block", False),
)


def trajectory(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The numbers of a run's probe.jsonl by update; empty with fewer than two measurements."""
    found = [{"step": row.get("step", 0), **depth_features(row["sites"])} for row in rows if row.get("sites")]
    return found if len(found) > 1 else []


def trajectory_figure(measured: Sequence[dict[str, Any]], columns: int = 2) -> Figure:
    """Six numbers of `trajectory` over the updates."""
    panels = [
        Panel(title, "update", [Line("", [(row["step"], row[name]) for row in measured])], log)
        for name, title, log in _WATCHED
    ]
    return line_panels(panels, "Over training", columns)


_SWEPT = (
    ("growth", "Stream, last block over first"),
    ("gradient_ratio", "Gradient, first block over last"),
    ("ratio_median", "Branch over stream, median"),
    ("weights_spread", "Gradient of the weights, spread"),
)


def sweep_figure(rows: Mapping[str, Mapping[int, Mapping[str, Any]]], axis: str) -> Figure:
    """Four numbers at initialisation against the depth, a line per value of the axis."""
    depths = sorted({depth for found in rows.values() for depth in found})
    panels = []
    for name, title in _SWEPT:
        lines = [
            Line(value, [(depth, found[depth].get(name)) for depth in sorted(found)], index, index // 7)
            for index, (value, found) in enumerate(rows.items())
        ]
        even = (1.0, "1: even") if name in ("growth", "gradient_ratio") else None
        panels.append(Panel(title, "blocks", lines, True, True, x_ticks=depths, limit=even))
    return line_panels(
        panels, f"At initialisation, by depth and {axis}" if axis else "At initialisation, by depth"
    )


def scale_figure(scales: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """|residual scale| by block and channel, of `residual_scales`; zero is grey."""
    maps = []
    for branch, rows in scales.items():
        values = np.abs(np.array(list(rows.values())))
        note = f"RMS {np.sqrt((values**2).mean()):.3g}, {values.min():.3g} to {values.max():.3g}"
        name = "attention" if branch == "attn" else "MLP"
        maps.append(NumberMap(f"{name} branch", values, list(rows), note=note))
    height = max(150.0, min(420.0, 10.0 * max(len(rows) for rows in scales.values())))
    title = "|Residual scale| by block and channel, log scale"
    return map_grid(maps, title, len(maps), size=(330.0, height), log=True)


def pixel_scale_figure(channels: Sequence[Mapping[str, Any]]) -> Figure:
    """`pixel_scales` as an image of the patch per colour."""
    maps = [
        NumberMap(
            one["channel"],
            np.array(one["scale"]),
            note=f"centre {one['centre']:.3f}, corners {one['corners']:.3f}",
        )
        for one in channels
    ]
    side = len(channels[0]["scale"])
    title = f"Scale of each pixel in patches of {side} × {side}"
    return map_grid(maps, title, min(len(maps), 3), size=(230.0, 230.0))


@styled
def filter_figure(found: Mapping[str, Any]) -> Figure:
    """`patch_filters` as small images; grey is zero."""
    filters = np.array(found["filters"])
    reach = float(np.abs(filters).max()) or 1.0
    columns = 12
    lines = -(-len(filters) // columns)
    title = f"Filters of the patch projection: {len(filters)} of {found['count']}, largest norm first"
    figure = new_figure(columns * 50, lines * 50 + 46, title)
    every = figure.subplots(lines, columns, squeeze=False, gridspec_kw={"wspace": 0.05, "hspace": 0.05})
    for axes in every.flat:
        axes.set_axis_off()
    for one, axes in zip(filters, every.flat, strict=False):
        image = one if len(one) == 3 else one.mean(0, keepdims=True).repeat(3, 0)
        axes.imshow(np.clip((image / reach + 1) / 2, 0, 1).transpose(1, 2, 0))
    colours = "colours as the weights" if filters.shape[1] == 3 else "mean over the channels"
    figure.supxlabel(f"grey is zero, the range is ±{reach:.3g}; {colours}", fontsize=10)
    return figure


@styled
def attention_figure(maps: Mapping[str, np.ndarray], pixels: np.ndarray) -> Figure:
    """The last blocks' attention by head beside the image, all on one scale.

    Args:
        maps: (heads, grid, grid) of each block, as `attention_by_head` returns them.
        pixels: The image as (H, W, 3) bytes.
    """
    from matplotlib.ticker import PercentFormatter

    chosen = dict(list(maps.items())[-_SHOWN_BLOCKS:])
    heads = min(max(len(one) for one in chosen.values()), _SHOWN_HEADS)
    figure = new_figure((heads + 2) * 100 + 60, len(chosen) * 118 + 30, "Attention over the image, by head")
    every = figure.subplots(len(chosen), heads + 2, squeeze=False)
    top = max(float(one[:heads].max()) for one in chosen.values())
    for axes in every.flat:
        axes.set_axis_off()
    for row, (name, one) in zip(every, chosen.items(), strict=True):
        row[0].imshow(pixels, aspect="equal")
        row[0].set_title(name, fontsize=10)
        tiles = {f"mean of {len(one)}": one.mean(0)} | {
            f"head {i}": head for i, head in enumerate(one[:heads])
        }
        for axes, (label, tile) in zip(row[1:], tiles.items(), strict=False):
            axes.imshow(tile, cmap=colour_map(), vmin=0, vmax=top, aspect="equal")
            axes.set_title(label, fontsize=10, fontweight="normal")
    bar = figure.colorbar(
        every[0, 1].images[0], ax=every, fraction=0.03, pad=0.01, format=PercentFormatter(1.0, decimals=1)
    )
    bar.outline.set_visible(False)
    bar.set_label("share of a patch", fontsize=10)
    return figure


@styled
def overlay_figure(pixels: np.ndarray, attention: np.ndarray, caption: str = "image") -> Figure:
    """An image beside itself under its attention map, with a scale that marks the share of an even map.

    Args:
        pixels: The model's input before normalisation as (H, W, 3), from 0 to 1.
        attention: Share of the attention on each patch.
        caption: Text above the image, such as its class.
    """
    from matplotlib.ticker import PercentFormatter

    figure = new_figure(560, 260)
    plain, mapped = figure.subplots(1, 2)
    plain.imshow(pixels, aspect="equal", interpolation="bicubic")
    whole = (-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5)
    mapped.imshow(pixels.mean(-1), cmap="gray", vmin=0, vmax=1, aspect="equal", interpolation="bicubic")
    shares = mapped.imshow(
        attention, cmap=colour_map(), vmin=0, alpha=0.6, extent=whole, aspect="equal", interpolation="bicubic"
    )
    for axes, title in ((plain, caption), (mapped, "attention")):
        axes.set_axis_off()
        axes.set_title(printed(title), fontsize=10)
    bar = figure.colorbar(shares, ax=[plain, mapped], format=PercentFormatter(1.0, decimals=2))
    bar.outline.set_visible(False)
    bar.ax.axhline(1 / attention.size, color=INK)
    bar.set_label("share of a patch; the line: if all were even", fontsize=10)
    return figure


def mixing_figure(matrices: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """`head_mixing`: to head down, from head across, on one scale."""
    maps = []
    for name, rows in matrices.items():
        values = np.array(rows)
        block, _, key = name.rpartition(".")
        share = float(np.abs(np.diag(values)).sum() / np.abs(values).sum())
        when = "before" if key == "proj_l" else "after"
        maps.append(NumberMap(f"{block}, {when}", values, note=f"diagonal {share:.0%}"))
    title = "Mixing of the heads before and after the softmax"
    return map_grid(maps, title, len(maps) // 2, size=(150.0, 180.0), labels=("from head", "to head"))


@styled
def cost_figure(parts: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """The share of each part in parameters, multiplications, saved activations and forward time, a bar each."""
    named = {"parameters": "parameters", "multiplications": "multiplications", "saved": "saved activations"}
    named["seconds"] = "forward time"
    figure = new_figure(620, 230, title)
    axes = figure.subplots()
    for row, quantity in enumerate(named):
        whole, left = sum(part[quantity] for part in parts.values()) or 1.0, 0.0
        for number, (name, part) in enumerate(parts.items()):
            share, label = 100 * part[quantity] / whole, name if row == 0 else None
            axes.barh(row, share, left=left, color=PALETTE[number % len(PALETTE)], label=label)
            left += share
    axes.set_yticks(range(len(named)), list(named.values()))
    axes.invert_yaxis()
    axes.set_xlabel("share in percent")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure
