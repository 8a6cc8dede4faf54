"""The page of benchmarks/duel.py: tables of settings, of equal batches, and of seeds with their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

TITLES = {
    "scaler": "The author's line, `vit_learnable_scaler_embed_dim192_patch16_head3_depth12`",
    "layernorm": "The author's line, `vit_tiny_patch16_224`: LayerNorm",
    "deit": "timm's train.py with flags of DeiT, `vit_tiny_patch16_224`",
}
WHY = {
    "--amp": "left open here: on a GPU that has bfloat16, yes; on a CPU, as in these runs, no",
    "--amp-dtype": "of no effect without `--amp`",
    "--aug-repeats": "off under either name",
    "--color-jitter": "of no effect beside `--aa`, on both sides",
    "--decay-epochs": "read by other schedules only",
    "--decay-rate": "read by other schedules only",
    "--momentum": "read by SGD only",
    "--torchcompile": "left open here: on a GPU in long runs, yes; in these runs, no",
    "--model-ema-warmup": "there it counts otherwise; off on both sides",
    "tensors by weight decay": "the class token's position is a tensor of its own here, a row of `pos_embed` there",
    "start: deviation of cls_token": "both are next to zero: 1e-6 there",
}
"""Why two values may differ and the runs do not."""


READ = {
    "scaler": "Read: train loss and accuracy do not differ. The author's val loss is lower by 0.011 over six seeds a "
    "side (p = 0.03; the first five gave 0.012, p = 0.04; the sixth pair was run later). It is one of nine "
    "intervals on this page; corrected for the nine it is [-0.004, +0.025], with zero in it. On equal batches "
    "nothing differs, so that what is left is how batches are drawn, or chance. Read in both codes and the same: "
    "order without replacement, whole batches, one mixture per batch, mirrored partners, val whole and in order, "
    "no EMA. One known difference remains: cutmix boxes of odd sides are a pixel longer here, which leaves 0.685 "
    "of an image instead of 0.694. Whether it is the cause has not been measured.",
}
"""What the seeds of a line say, where the table alone would be misread."""

STAY = (
    ("mean, std, crop share", "of the model", "the same: a model's name brings them", "the start of a run"),
    ("class token and its position", "two parameters", "two", "changelog"),
    ("start of the patch projection", "torch's convolution", "the same", "switches"),
    ("`--drop-path`", "linear in ViT and DeiT", "the same", "coming from"),
    ("`--drop-path` of DeiT-III", "linear in timm", "uniform, as its authors have it", "coming from"),
    ("`--color-jitter` beside `--aa`", "no effect, unless `3a`", "the same", "a line of the run"),
    ("checkpoints of `--sched custom`", "hold a numpy number", "it is read as data", "changelog"),
    ("residual stream under bfloat16", "float32", "bfloat16, or autocast_fp32_stream", "coming from"),
    ("last, partial accumulation", "split for some numbers of batches", "one smaller update", "coming from"),
    (
        "cutmix, boxes of odd sides",
        "a pixel short in the author's timm",
        "whole, as in timm 1.0",
        "coming from",
    ),
    ("mixing", "of rounded bytes", "of floats, below 1/255", "coming from"),
    ("`--reprob` beside mixing", "mixes, then erases", "erases, then mixes", "coming from"),
    ("classes", "1,000 unless `--num-classes`", "those of the data", "the start of a run"),
    ("`--img-size`", "of the data", "of data and model", "the start of a run"),
    ("a loss that is not finite", "goes on", "`--guard stop` ends the run", "training"),
    ("posterize to 0 bits, Pillow 13", "stops", "black, as with Pillow 11", "coming from"),
)
"""Settings that were found different by hand at cf1a1fe, and where users are told what is."""
PAGES = {
    "changelog": "../CHANGELOG.md",
    **{name: f"../docs/{name.replace(' ', '_')}.md" for name in ("coming from", "switches", "training")},
}


def _stay() -> str:
    lines = [
        "## Settings that differed, or do",
        "",
        "| setting | there | here | told in |",
        "|---|---|---|---|",
    ]
    for setting, there, here, told in STAY:
        place = f"[{told}]({PAGES[told]})" if told in PAGES else told
        lines.append(f"| {setting} | {there} | {here} | {place} |")
    return "\n".join(lines)


def page(rows: dict[str, Any]) -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, title in TITLES.items():
        own = [
            made
            for part, table in (("settings", _settings), ("batches", _batches), ("seeds", _seeds))
            if (made := table(rows, part, name))
        ]
        if own:
            parts += [f"## {title}", *own, *([READ[name]] if name in READ else [])]
    parts.append(_stay())
    return "\n\n".join(parts) + "\n"


INTRODUCTION = """# `fathoms train` beside the author's train.py, and timm's

`python benchmarks/duel.py settings|batches|seeds --author CLONE --timm CLONE --images FOLDER --line NAME`, then
`python benchmarks/duel.py page`. Clones: nghiemtuan/LearnableScaler 1750860 with its timm 0.8.21dev0, and
huggingface/pytorch-image-models aa4b585 (1.0.29.dev0), both as they are. Images: CIFAR-10 as PNG of 32 pixels, the
first 200 (seeds) or 40 (equal batches) of each class to train and the first 100 (20) of its test set; 48 pixels,
float32, one thread of a CPU, nothing compiled. `--num-classes 10 --model-kwargs img_size=48` are the peer's alone."""


def _settings(rows: dict[str, Any], part: str, name: str) -> str:
    found = rows[part].get(name, [])
    if not found:
        return ""
    differ = [row for row in found if row[1] != row[2]]
    table = [
        f"### Settings: {len(found)} compared, {len(differ)} written otherwise",
        "| setting | there | here | why the runs are alike |\n|---|---|---|---|\n"
        + "\n".join(
            f"| {key} | {theirs} | {ours} | {WHY.get(key, '**not alike**')} |" for key, theirs, ours in differ
        ),
        "The same: " + ", ".join(f"{key} {ours}" for key, theirs, ours in found if theirs == ours) + ".",
    ]
    return "\n\n".join(table)


def _batches(rows: dict[str, Any], part: str, name: str) -> str:
    row = rows[part].get(name)
    if row is None:
        return ""
    ends = [" / ".join(f"{value:.6f}" for value in pair) for pair in (*row["loss"], *row["norm"])]
    pairs = list(zip(row["peer_evaluations"], row["evaluations"], strict=True))
    val = max(abs(a["val"] - b["val"]) for a, b in pairs)
    same = all(a["top1"] == b["top1"] for a, b in pairs)
    return (
        "### Equal batches and weights\n\nIts train.py wrote its batches and first weights; fathoms' trainer ran on "
        "them.\n\n| updates | first loss, there / here | last | first gradient norm | last | loss apart, at most "
        "| norm | learning rate | val loss, by epoch | top-1 |\n|---|---|---|---|---|---|---|---|---|---|\n"
        f"| {row['updates']} | {ends[0]} | {ends[1]} | {ends[2]} | {ends[3]} | {row['loss_apart']:.1e} | "
        f"{row['norm_apart']:.1e} of it | {row['rate_apart']:.0e} | {val:.1e} | {'equal' if same else 'not equal'} |"
    )


def _seeds(rows: dict[str, Any], part: str, name: str) -> str:
    last: dict[str, list[dict[str, float]]] = {"peer": [], "fathoms": []}
    for key, run in sorted(rows[part].items()):
        line, side, _ = key.split("/")
        if line == name:
            last[side].append(run[-1])
    if min(len(runs) for runs in last.values()) < 2:
        return ""
    lines, differences = [], []
    for side, word in (("peer", "there"), ("fathoms", "here")):
        runs = last[side]
        cells = [_mean_and_spread([run[key] for run in runs]) for key in ("train", "val", "top1")]
        seeds = " ".join(f"{run['top1']:.1f}" for run in runs)
        lines.append(f"| {word} | {len(runs)} | {' | '.join(cells)} | {seeds} |")
    for key in ("train", "val", "top1"):
        sides = [[run[key] for run in last[side]] for side in ("fathoms", "peer")]
        test = stats.ttest_ind(*sides, equal_var=False)
        low, high = test.confidence_interval(0.95)
        middle = float(np.mean(sides[0]) - np.mean(sides[1]))
        digits = 1 if key == "top1" else 3
        text = f"{middle:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
        differences.append(text if low <= 0 <= high else f"**{text}**")
    return (
        "### Seeds\n\nAfter the last epoch: mean, and the standard deviation over seeds.\n\n"
        "| side | seeds | train loss | val loss | top-1, % | top-1 by seed |\n|---|---|---|---|---|---|\n"
        + "\n".join(lines)
        + f"\n| here - there, 95 % Welch | | {' | '.join(differences)} | |\n\nBold: without zero."
    )


def _mean_and_spread(values: list[float]) -> str:
    return f"{np.mean(values):.4g} ({np.std(values, ddof=1):.2g})"
