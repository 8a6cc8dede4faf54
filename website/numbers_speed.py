"""Models and operations beside timm and torch.compile, for README and docs/speed.md."""

from __future__ import annotations

from doc_format import Read, Row, listed, span, table, text

LABELS = {
    "vit_192x36": "ViT 192×36 LayerNorm",
    "vit_small": "ViT-S/16",
    "vit_base": "ViT-B/16",
    "vit_192x36_folded_infer": "ViT 192×36, LearnableScaler folded, against timm's LayerNorm",
}


@text
def speed_claim(read: Read) -> str:
    rows = read("models")["rows"]
    named = {"cait_s24_384": "cait_s24_384", "vit_small": "ViT-S", "vit_base": "ViT-B"}
    first, others = rows["cait_s24_224"], ((rows[key], name) for key, name in named.items())
    rest = [f"{name} {row['ratio']:.2f} times in {row['memory_ratio']:.2f}" for row, name in others]
    return (
        f"cait_s24_224 trains {first['ratio']:.2f} times as fast as timm + torch.compile in "
        f"{first['memory_ratio']:.2f} of the memory, {listed(rest)}, on one {first['device']}"
    )


@text
def models_table(read: Read) -> str:
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
            # The quicker of the modes of torch.compile that were raced.
            raced = len(row[side].get("modes", ())) > 1
            rate += f" ({row[side]['compile_mode'] if raced else 'default alone'})"
        cells.append(rate if infer else f"{rate}, {row[side]['peak_gib']:.1f} GiB")
    goal = "" if row["wanted_ratio"] is None else f"{row['wanted_ratio']}×"
    return [work, *cells, f"{row['ratio']:.2f}×", goal, f"{row['memory_ratio']:.2f}×"]


@text
def scaler_speed(read: Read) -> str:
    row = read("models")["rows"]["vit_192x36_scaler"]
    rates = listed(f"{row[side]['images_per_second']:,.0f}" for side in row["sides"])
    missed = f"; {row['wanted_ratio']} was the goal" if row["ratio"] < row["wanted_ratio"] else ""
    return (
        f"LearnableScaler trains {row['ratio']:.2f} times as fast as our own LayerNorm in ViT 192×36 "
        f"({rates} images/s{missed})"
    )


@text
def folded_time(read: Read) -> str:
    row = read("models")["rows"]["vit_192x36_folded_infer"]
    taken = row["fathoms"]["ms"]
    floor = taken * row["fathoms"]["matrix_share"]
    return f"{taken:.1f} ms for {row['batch']} images, its products alone at the measured matrix rate {floor:.1f}"


def _ops(read: Read, op: str) -> list[Row]:
    return [row for name, row in read("ops")["rows"].items() if name.startswith(f"{op} ")]


def _each(rows: list[Row], key: str, form: str) -> str:
    return listed(f"{row[key]:{form}}" for row in rows)


def _worst_error(rows: list[Row], kernel: str, reference: str) -> float:
    return max(
        error / row["errors"][reference][name]
        for row in rows
        for name, error in row["errors"][kernel].items()
    )


@text
def bias_gelu(read: Read) -> str:
    rows = _ops(read, "bias_gelu")
    sizes = listed(f"{row['shape'][0]:,} x {row['shape'][1]:,}" for row in rows)
    shares = [100 * row[f"share_of_floor_{part}"] for row in rows for part in ("forward", "training")]
    return (
        f"At {sizes} in bfloat16 on an H200 a forward pass is {_each(rows, 'speedup_forward', '.2f')} times as fast as "
        f"torch.compile's and one with its gradients {_each(rows, 'speedup_training', '.2f')} times, at "
        f"{span(shares, '.0f')} % of the copy rate"
    )


@text
def talking_heads_table(read: Read) -> str:
    sides = ["kernels", "reference, compiled", "timm's code, compiled", "attention without mixing"]
    rows = []
    for row in _ops(read, "talking_heads"):
        kinds = [row[name] for name in ("triton", "compiled", "compiled_timm")]
        times = [f"{kind['training_ms']:#.3g} ({kind['peak_mib']:,.0f} MiB)" for kind in kinds]
        rows.append([_shape(row), *times, f"{row['sdpa']['training_ms']:.2f}"])
    return table(["B, H, N, K", *sides], rows)


def _shape(row: Row) -> str:
    return ", ".join(f"{size:,}" for size in row["shape"])


@text
def talking_heads(read: Read) -> str:
    rows = _ops(read, "talking_heads")
    return (
        f"That is {_each(rows, 'speedup_over_timm_training', '.1f')} times as fast as timm's code, and "
        f"{span((row['times_sdpa_training'] for row in rows), '.1f')} times the time of attention without mixing. "
        f"Errors against float64 are at most {_worst_error(rows, 'triton', 'eager'):.2f} of the reference's."
    )


@text
def class_attention_table(read: Read) -> str:
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


@text
def class_attention(read: Read) -> str:
    rows = _ops(read, "class_attention")
    return (
        f"That is {_each(rows, 'speedup_training', '.2f')} times as fast as the reference, both compiled. Not "
        f"compiled, errors against float64 are at most {_worst_error(rows, 'absorbed', 'plain'):.2f} of the "
        "reference's."
    )
