"""Pictures of learned weights: residual scales, Dual PatchNorm's pixel scale, patch filters, head mixing."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from fathoms.drawing.colours import SOFT
from fathoms.drawing.picture import Picture
from fathoms.parts.attentions.attention import TalkingHeadsAttention
from fathoms.parts.tokens.stem import PatchEmbed
from fathoms.probes.blocks import find_blocks, scales_of
from fathoms.probes.pictures.heat_maps import HeatMap, row_of

_COLOURS = ("red", "green", "blue")
# Filters, and blocks with talking heads, that are drawn.
_FILTERS, _MIXERS = 48, 6


def scale_picture(model: nn.Module) -> Picture | None:
    """The residual scale |gamma| by block and channel; None where the model has none."""
    maps, data = [], {}
    for branch, name in (("attn", "attention"), ("mlp", "MLP")):
        rows = {}
        for block, module in find_blocks(model).items():
            gammas, _ = scales_of(module, branch)
            if gammas:
                rows[block] = _numbers(gammas[0]).reshape(-1)
        widths = {len(row) for row in rows.values()}
        if not rows or len(widths) != 1:
            continue
        values = np.abs(np.stack(list(rows.values())))
        data[branch] = {block: row.tolist() for block, row in rows.items()}
        size = (max(120.0, min(420.0, 2.0 * values.shape[1])), max(60.0, min(420.0, 10.0 * len(values))))
        notes = [
            f"RMS {np.sqrt((values**2).mean()):.3g}, least {values.min():.3g}, largest {values.max():.3g}"
        ]
        maps.append(
            HeatMap(
                f"|scale| of the {name} branch", values, size, None, notes, ("block 0", str(len(values) - 1))
            )
        )
    if not maps:
        return None
    picture = row_of(
        maps, "Residual scale by block and channel", "rows: blocks from the first; columns: channels"
    )
    picture.data = data
    return picture


def pixel_scale_picture(model: nn.Module) -> Picture | None:
    """Dual PatchNorm's ln0 weight as a P x P image per colour, with its centre and its corners; None without ln0."""
    stem = next((m for m in model.modules() if isinstance(m, PatchEmbed) and m.ln0 is not None), None)
    if stem is None or stem.ln0 is None or stem.ln0.weight is None:
        return None
    side = stem.patch_size
    scale = _numbers(stem.ln0.weight).reshape(side, side, stem.in_channels)
    limits = (float(scale.min()), float(scale.max()))
    maps, data = [], []
    for channel in range(stem.in_channels):
        values = scale[..., channel]
        centre, corner = centre_and_corners(values)
        name = _COLOURS[channel] if stem.in_channels == 3 else f"channel {channel}"
        notes = [f"centre {centre:.3f}, corners {corner:.3f}", f"centre / corners {centre / corner:.3f}"]
        maps.append(HeatMap(name, values, limits=limits, notes=notes))
        data.append({"channel": name, "centre": centre, "corners": corner, "scale": values.tolist()})
    picture = row_of(maps, f"Scale of each pixel in patches of {side} x {side} (ln0 of Dual PatchNorm)")
    picture.data = data
    return picture


def centre_and_corners(values: np.ndarray) -> tuple[float, float]:
    """Mean |scale| of the middle quarter of the pixels, and of the four corners of one sixteenth each."""
    side = values.shape[0]
    size = np.abs(values)
    low, high = side // 4, side - side // 4
    reach = max(side // 4, 1)
    near, far = slice(0, reach), slice(side - reach, side)
    corners = [size[rows, columns].mean() for rows in (near, far) for columns in (near, far)]
    return float(size[low:high, low:high].mean()), float(np.mean(corners))


def filter_picture(model: nn.Module) -> Picture | None:
    """Filters of the patch projection, those with the largest norm first; None where there is no such layer."""
    filters = _patch_filters(model)
    if filters is None:
        return None
    order = torch.linalg.vector_norm(filters.flatten(1), dim=1).argsort(descending=True)[:_FILTERS]
    chosen = filters[order]
    low, high = float(chosen.min()), float(chosen.max())
    reach = max(abs(low), abs(high)) or 1.0
    columns = 12
    title = f"Filters of the patch projection ({len(chosen)} of {len(filters)}, by norm)"
    picture = Picture(columns * 52.0 + 28, math.ceil(len(chosen) / columns) * 52.0 + 60, title)
    channels = chosen.shape[1]
    colours = "colours as the weights" if channels == 3 else "mean over the channels"
    picture.text((16, 22), title, size=14, bold=True)
    picture.text((16, 40), f"grey is zero, the range is +-{reach:.3g}; {colours}", colour=SOFT)
    for place, one in enumerate(chosen):
        image = one if channels == 3 else one.mean(0, keepdim=True).expand(3, -1, -1)
        pixels = ((image / reach + 1) * 127.5).round().clamp(0, 255).permute(1, 2, 0).numpy()
        picture.pixels((16 + 52.0 * (place % columns), 52 + 52.0 * (place // columns)), (48, 48), pixels)
    picture.data = {"order": order.tolist(), "filters": chosen.tolist()}
    return picture


def _patch_filters(model: nn.Module) -> Tensor | None:
    """(D, C, P, P) weights of the first layer of patches."""
    for module in model.modules():
        if isinstance(module, PatchEmbed):
            side = module.patch_size
            weight = module.proj.weight.detach().cpu().float()
            return weight.unflatten(1, (side, side, module.in_channels)).permute(0, 3, 1, 2)
        if (
            isinstance(module, nn.Conv2d)
            and module.stride == module.kernel_size
            and module.kernel_size[0] > 1
        ):
            return module.weight.detach().cpu().float()
    return None


def mixing_picture(model: nn.Module) -> Picture | None:
    """Talking heads' mixing matrices of a few blocks from the first to the last; None without talking heads."""
    found = [
        (name, module)
        for name, block in find_blocks(model).items()
        for module in block.modules()
        if isinstance(module, TalkingHeadsAttention)
        or (hasattr(module, "proj_l") and hasattr(module, "proj_w"))
    ]
    if not found:
        return None
    count = min(_MIXERS, len(found))
    chosen = [found[round(i * (len(found) - 1) / max(count - 1, 1))] for i in range(count)]
    maps: list[HeatMap] = []
    data = {}
    for key, title in (("proj_l", "before the softmax"), ("proj_w", "after it")):
        for name, module in chosen:
            values = _numbers(getattr(module, key).weight)
            share = float(np.abs(np.diag(values)).sum() / np.abs(values).sum())
            maps.append(
                HeatMap(f"{name} {title}", values, (140, 140), notes=[f"diagonal {share:.0%} of the weight"])
            )
            data[f"{name}.{key}"] = values.tolist()
    picture = row_of(maps, "Mixing of the heads", "rows: to head; columns: from head", columns=len(chosen))
    picture.data = data
    return picture


def _numbers(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()
