"""Tables about several GPUs, for docs/speed.md: what was measured on one, and what is computed from it for eight."""

from __future__ import annotations

from collections.abc import Callable

from doc_format import Read, Row, listed, table

# Rows of results/models.json with the rate of a recipe's model, until its own update has been measured.
SAME_MODEL = {
    "learnable_scaler_300": ("vit_192x36_scaler", "learnable_scaler"),
    "cait_400": ("cait_s24_224", "fathoms"),
    "rsb_a2": ("vit_small", "fathoms"),
}


def _update(name: str, row: Row, read: Read) -> tuple[int, float, str] | None:
    """Batch and milliseconds of an update on one GPU, and where they come from; None if nothing was measured."""
    own = row["measured"]
    if own is not None:
        return own["batch"], own["update_ms"], "its own update"
    if name not in SAME_MODEL:
        return None
    key, side = SAME_MODEL[name]
    other = read("models")["rows"][key]
    return other["batch"], other[side]["ms"], "its model with AdamW, results/models.md"


def _rows(read: Read) -> list[tuple[str, Row, tuple[int, float, str]]]:
    rows = read("many_gpus")["rows"].items()
    found = [(name, row, _update(name, row, read)) for name, row in rows]
    return [(name, row, update) for name, row, update in found if update is not None]


def one_gpu_table(read: Read) -> str:
    """Table of measurements on one GPU."""
    head = [
        "recipe",
        "model",
        "batch",
        "images/s",
        "measured",
        "exchange of one rank, ms: all-reduce",
        "--fsdp",
    ]
    rows = []
    for name, row, (batch, ms, source) in _rows(read):
        own = row["measured"]
        calls = (
            ["not measured"] * 2
            if own is None
            else [f"{own[key]:.2f}" for key in ("reduce_ms", "scatter_gather_ms")]
        )
        rows.append([name, row["model"], f"{batch}", f"{1e3 * batch / ms:,.0f}", source, *calls])
    return table(head, rows)


def eight_gpus_table(read: Read) -> str:
    """Table computed for eight GPUs, nothing overlapped."""
    links = next(iter(read("many_gpus")["rows"].values()))["exchange_ms"]
    head = ["recipe", "epochs", "hours on one GPU"]
    head += [
        f"{link}: {what}"
        for link in links
        for what in ("exchange, ms", "images/s on eight", "hours on eight")
    ]
    rows = []
    for name, row, (batch, ms, _) in _rows(read):
        images = row["epochs"] * row["images"]
        cells = [name, f"{row['epochs']}", f"{images * ms / batch / 3.6e6:,.1f}"]
        called = 0.0 if row["measured"] is None else row["measured"]["reduce_ms"]
        for exchange in row["exchange_ms"].values():
            together = 1e3 * row["gpus"] * batch / (ms + called + exchange)
            cells += [f"{exchange:.2f}", f"{together:,.0f}", f"{images / together / 3600:,.1f}"]
        rows.append(cells)
    return table(head, rows)


def link_rates(read: Read) -> str:
    """The assumptions of that table."""
    assumed = next(iter(read("many_gpus")["rows"].values()))["assumed"]
    rates = listed(f"{link} {rate / 1e9:.0f} GB/s" for link, rate in assumed.items() if link != "reached")
    share = f"{assumed['reached']:.0%}".replace("%", " %")
    return f"{rates} a GPU in each direction, of which a collective reaches {share}"


TEXTS: dict[str, Callable[[Read], str]] = {
    made.__name__.replace("_", "-"): made for made in (one_gpu_table, eight_gpus_table, link_rates)
}
"""Generated texts by the name of their markers."""
