"""Sentences and tables about speed, for README and docs/speed.md, made from results/models.json and ops.json."""

from __future__ import annotations

from collections.abc import Callable

from doc_format import Read, Row, listed, span, table

LABELS = {
    "vit_192x36": "ViT 192×36 LayerNorm",
    "vit_small": "ViT-S/16",
    "vit_base": "ViT-B/16",
    "vit_192x36_folded_infer": "ViT 192×36, LearnableScaler folded, against timm's LayerNorm",
}


def speed_claim(read: Read) -> str:
    """Four models beside timm, for README."""
    rows = read("models")["rows"]
    named = {"cait_s24_384": "cait_s24_384", "vit_small": "ViT-S", "vit_base": "ViT-B"}
    first = rows["cait_s24_224"]
    rest = [
        f"{name} {rows[key]['ratio']:.2f} times in {rows[key]['memory_ratio']:.2f}"
        for key, name in named.items()
    ]
    return (
        f"cait_s24_224 trains {first['ratio']:.2f} times as fast as timm + torch.compile in "
        f"{first['memory_ratio']:.2f} of the memory, {listed(rest)}, on one {first['device']}"
    )


def models_table(read: Read) -> str:
    """Every row beside timm."""
    rows = {name: row for name, row in read("models")["rows"].items() if "timm" in row}
    head = ["work, one H200, bfloat16", "fathoms", "timm + torch.compile (mode)", "speed", "goal", "memory"]
    return table(head, (_model_cells(name, row) for name, row in rows.items()))


def _model_cells(name: str, row: Row) -> list[str]:
    infer = row["mode"] == "infer"
    label = LABELS.get(name, name.removesuffix("_infer"))
    work = f"{label}, {'inference' if infer else 'training'}, batch {row['batch']}"
    cells = []
    for side in row["sides"]:
        rate = f"{row[side]['images_per_second']:,.0f} images/s"
        if side == "timm":
            rate += f" ({_mode(row[side])})"
        cells.append(rate if infer else f"{rate}, {row[side]['peak_gib']:.1f} GiB")
    goal = "" if row["wanted_ratio"] is None else f"{row['wanted_ratio']}×"
    return [work, *cells, f"{row['ratio']:.2f}×", goal, f"{row['memory_ratio']:.2f}×"]


def _mode(side: Row) -> str:
    """The quicker of the modes of torch.compile that were raced."""
    return side["compile_mode"] if len(side.get("modes", ())) > 1 else "default alone"


def scaler_speed(read: Read) -> str:
    """LearnableScaler beside LayerNorm, both ours."""
    row = read("models")["rows"]["vit_192x36_scaler"]
    rates = listed(f"{row[side]['images_per_second']:,.0f}" for side in row["sides"])
    missed = f"; {row['wanted_ratio']} was the goal" if row["ratio"] < row["wanted_ratio"] else ""
    return (
        f"LearnableScaler trains {row['ratio']:.2f} times as fast as our own LayerNorm in ViT 192×36 "
        f"({rates} images/s{missed})"
    )


def folded_time(read: Read) -> str:
    """The folded model and its floor."""
    row = read("models")["rows"]["vit_192x36_folded_infer"]
    taken = row["fathoms"]["ms"]
    floor = taken * row["fathoms"]["matrix_share"]
    return f"{taken:.1f} ms for {row['batch']} images, its products alone at the measured matrix rate {floor:.1f}"


def _ops(read: Read, op: str) -> list[Row]:
    rows = [row for name, row in read("ops")["rows"].items() if name.startswith(f"{op} ")]
    return rows if op != "gelu_mlp" else sorted(rows, key=lambda row: row["shape"])


def _each(rows: list[Row], key: str, form: str) -> str:
    return listed(f"{row[key]:{form}}" for row in rows)


def _worst_error(rows: list[Row], kernel: str, reference: str) -> float:
    """The greatest error of an implementation over that of its reference."""
    return max(
        error / row["errors"][reference][name]
        for row in rows
        for name, error in row["errors"][kernel].items()
    )


def bias_gelu(read: Read) -> str:
    """GELU with the bias."""
    rows = _ops(read, "bias_gelu")
    sizes = listed(f"{row['shape'][0]:,} x {row['shape'][1]:,}" for row in rows)
    shares = [100 * row[f"share_of_floor_{part}"] for row in rows for part in ("forward", "training")]
    return (
        f"At {sizes} in bfloat16 on an H200 a forward pass is {_each(rows, 'speedup_forward', '.2f')} times as fast as "
        f"torch.compile's and one with its gradients {_each(rows, 'speedup_training', '.2f')} times, at "
        f"{span(shares, '.0f')} % of the copy rate"
    )


def talking_heads_table(read: Read) -> str:
    """Talking heads, forward and backward."""
    head = [
        "B, H, N, K",
        "kernels",
        "reference, compiled",
        "timm's code, compiled",
        "attention without mixing",
    ]
    rows = []
    for row in _ops(read, "talking_heads"):
        kinds = [row[name] for name in ("triton", "compiled", "compiled_timm")]
        times = [f"{kind['training_ms']:#.3g} ({kind['peak_mib']:,.0f} MiB)" for kind in kinds]
        rows.append([_shape(row), *times, f"{row['sdpa']['training_ms']:.2f}"])
    return table(head, rows)


def _shape(row: Row) -> str:
    return ", ".join(f"{size:,}" for size in row["shape"])


def talking_heads(read: Read) -> str:
    """The sentence below that table."""
    rows = _ops(read, "talking_heads")
    return (
        f"That is {_each(rows, 'speedup_over_timm_training', '.1f')} times as fast as timm's code, and "
        f"{span((row['times_sdpa_training'] for row in rows), '.1f')} times the time of attention without mixing. "
        f"Errors against float64 are at most {_worst_error(rows, 'triton', 'eager'):.2f} of the reference's."
    )


def class_attention_table(read: Read) -> str:
    """Class attention, forward / forward and backward."""
    head = ["B, N, D, H", "plain", "plain, compiled", "absorbed", "absorbed, compiled"]
    rows = []
    for row in _ops(read, "class_attention"):
        kinds = [row[name] for name in ("plain", "compiled", "absorbed", "absorbed_compiled")]
        times = [
            f"{kind['forward_ms']:.3f} / {kind['training_ms']:.3f} ({kind['peak_mib']:.0f} MiB)"
            for kind in kinds
        ]
        rows.append([_shape(row), *times])
    return table(head, rows)


def class_attention(read: Read) -> str:
    """The sentence below that table."""
    rows = _ops(read, "class_attention")
    return (
        f"That is {_each(rows, 'speedup_training', '.2f')} times as fast as the reference, both compiled. Not "
        f"compiled, errors against float64 are at most {_worst_error(rows, 'absorbed', 'plain'):.2f} of the "
        "reference's."
    )


def gelu_mlp_table(read: Read) -> str:
    """The MLP kernel of inference."""
    rows = []
    for row in _ops(read, "gelu_mlp"):
        kinds = [row[name] for name in ("triton", "compiled", "eager")]
        times = [kind["forward_ms"] for kind in kinds]
        cells = [f"{1e3 * kind['forward_ms']:.1f} ({kind['peak_mib']:.0f} MiB)" for kind in kinds]
        rows.append([f"{row['shape'][1]}", *cells, f"{min(times[1:]) / times[0]:.1f}×"])
    return table(["channels", "kernel", "torch.compile", "eager", "speed-up"], rows)


def gelu_mlp(read: Read) -> str:
    """The sentence below that table."""
    rows = _ops(read, "gelu_mlp")
    worst = max(row["errors"]["triton"] / row["errors"]["eager"] for row in rows)
    (narrow,) = [row for row in rows if row["shape"][1] == 192]
    return (
        f"Errors against float64 are {worst:.2f} of the reference's, whose hidden activations are rounded twice. "
        f"Products at the measured matrix rate would take {1e3 * narrow['floor']['forward_ms']:.0f} µs at 192 channels."
    )


def residual_norm(read: Read) -> str:
    """The residual addition with the norm after it."""
    rows = {(tuple(row["size"]), row["norm"], row["scale"]): row for row in read("residual_norm")["rows"]}
    size = (50432, 384)
    bare, full = rows[size, "bare", "none"], rows[size, "layernorm", "channel"]
    return (
        f"At {size[0]:,} tokens of {size[1]} channels it takes {bare['compiled']['training_ms']:.3f} ms forward and "
        f"backward, at the rate of copies; with LayerNorm's gain and shift and LayerScale, as under autocast, "
        f"{full['compiled']['training_ms']:.3f} ms. Hand-written kernels for the latter took "
        f"{full['fused']['training_ms']:.3f} ms and were deleted, since the former beats them"
    )


def accelerate_training(read: Read) -> str:
    """Training of timm's CaiT after `accelerate`, beside timm's compiled form."""
    name, row = next(iter(read("accelerate_training")["rows"].items()))
    plain, graph = row["autocast, launched"], row["autocast, graph"]
    return (
        f"After `fathoms.accelerate`, timm's {name} trains at {plain['images_per_second']:,.0f} images/s under "
        f"autocast with its blocks compiled, {plain['ratio']:.2f} times as fast as timm's own compiled so, in "
        f"{plain['memory_ratio']:.2f} of the memory (batch {row['batch']}); replayed as a CUDA graph, "
        f"{graph['ratio']:.2f} times"
    )


TEXTS: dict[str, Callable[[Read], str]] = {
    made.__name__.replace("_", "-"): made
    for made in (
        speed_claim,
        models_table,
        scaler_speed,
        folded_time,
        bias_gelu,
        talking_heads_table,
        talking_heads,
        class_attention_table,
        class_attention,
        gelu_mlp_table,
        gelu_mlp,
        residual_norm,
        accelerate_training,
    )
}
"""Generated texts by the name of their markers."""
