"""Sentences about training, reliability and surgery, for README, RELIABILITY and docs, made from results/."""

from __future__ import annotations

import statistics

from doc_format import Read, Row, listed, span, text


@text
def fed_from_files(read: Read) -> str:
    loader = read("loader")
    epochs = loader["train_from_a_pack"]["images_per_second_of_epochs_2_to_4"]
    still = loader["feed_graph_processes"]
    return (
        f"With JPEG images from packed shards, RandAugment, erasing and mixing, `fathoms train` ran ViT 192×36 at "
        f"{span(epochs, ',')} images/s on an H200 with {still['cores']} cores; the same batch over and over gave "
        f"{still['still_images_per_second']:,.0f}"
    )


@text
def fed_share(read: Read) -> str:
    loader = read("loader")
    threads, processes = loader["feed_graph_threads"], loader["feed_graph_processes"]
    workers, kept = next(iter(threads["by_workers"].items()))
    return (
        f"on {threads['cores']} cores a loop fed by {workers} threads kept {kept['fed_share']:.2f} of its rate, and "
        f"fed by 8 processes {processes['by_workers']['8']['fed_share']:.2f}"
    )


@text
def loader_ratios(read: Read) -> str:
    loader = read("loader")
    default, bilinear = (
        span((ratio for path, ratio in loader[part]["ratios"].items() if path != "timm"), ".1f")
        for part in ("cpu", "cpu_bilinear")
    )
    return f"{default} times as fast per core as timm's ({bilinear} with bilinear filters)"


@text
def soak(read: Read) -> str:
    kept = read("soak")
    end = "equal bit for bit" if kept["equal bit for bit"] else "not equal"
    return (
        f"{kept['kills']} SIGKILLs in one run, {kept['killed in a save']} of them aimed at a save: "
        f"{kept['unusable checkpoints'] or 'no'} unusable checkpoints, the end {end}"
    )


@text
def fuzz(read: Read) -> str:
    kept = read("fuzz")
    found = [f"{kept[key] or 'no'} {key.replace('_', ' ')}" for key in ("crashes", "hangs", "stray_files")]
    return f"{kept['cases']:,} mutated files: {listed(found)}"


@text
def guard_cost(read: Read) -> str:
    kept = read("guard")
    each = ", ".join(f"{stall:.2f}" for stall in kept["stall_steps_each"])
    return (
        f"On one H200, {kept['model']} at {kept['batch_size']} images an update launched kernel by kernel "
        f"({kept['bare_ms']:.0f} ms): the guard changes that by {kept['guard_percent']:.1f} %, within the spread of "
        f"{kept['bare_spread_percent']:.1f} %, a check that waits for the device {kept['waiting_percent']:.0f} %. "
        f"Saving the {kept['checkpoint_mb']:.0f} MB of a checkpoint in the background costs "
        f"{kept['stall_steps']:.2f} updates (median of {each}), and it is complete after {kept['whole_after_s']:.1f} s"
    )


@text
def surgery_models(read: Read) -> str:
    steps = [row["steps"] for row in read("zoo").values() if "not built" not in row]
    gaps = [each["fold"]["gap"] for each in steps if each.get("fold", {}).get("gap") is not None]
    refused = sum("refused" in each.get("fold", {}) for each in steps)
    norms = sum(each.get("swap", {}).get("swapped", 0) for each in steps)
    return (
        f"{len(gaps)} models of timm, torchvision and transformers keep their output when folded, within "
        f"{max(gaps):.1e} of its largest value (refused with the reason: {refused}); {norms:,} of their norms are "
        "swapped and held against a formula written apart"
    )


@text
def fold_times(read: Read) -> str:
    close = 0.03
    noise, gains = {}, {}
    for peer in read("surgery")["peers"]:
        before, copy, after = peer["ms"]
        noise[peer["model"]] = max(before, copy) / min(before, copy) - 1
        gains[peer["model"]] = 1 - after / min(before, copy)
    faster = sorted((name for name in gains if gains[name] > close), key=lambda name: -gains[name])
    slower = [name for name in gains if gains[name] < -close]
    named = listed(f"{100 * gains[name]:.0f} % off `{name}`" for name in faster)
    return (
        f"A model and its own copy differ by up to {100 * max(noise.values()):.0f} %. Against the faster of the two, "
        f"folding takes {named}; {len(gains) - len(faster) - len(slower)} models stay within {100 * close:.0f} %; "
        f"{len(slower)} come out slower, by {span((-100 * gains[name] for name in slower), '.0f')} %, with copies that "
        f"were {span((100 * noise[name] for name in slower), '.0f')} % apart."
    )


def _swap_mean(rows: list[Row], to: str, how: str, column: str) -> float:
    return statistics.mean(row[column] for row in rows if (row["to"], row["how"]) == (to, how))


@text
def swap_digits(read: Read) -> str:
    rows = read("surgery")["digits"]
    parts = []
    for to, name in (("learnable_scaler", "LearnableScaler"), ("dyt", "DyT")):
        swapped, after = (_swap_mean(rows, to, "calibrate", column) for column in ("swapped", "after 1"))
        parts.append(f"{name} has {swapped:.0f} % right after the swap and {after:.0f} % after one epoch")
    before = statistics.mean(row["before"] for row in rows)
    return f"{', '.join(parts)}, of {before:.0f} % before (means over {len({row['seed'] for row in rows})} seeds)"


@text
def accelerate_cpu(read: Read) -> str:
    shares: dict[str, list[str]] = {"training": [], "inference": []}
    for row in read("accelerate_cpu")["rows"]:
        for part, found in shares.items():
            before, copy, after = row[part]
            found.append(f"{after / min(before, copy):.2f} in {row['model'].partition('_224')[0]}")
    return (
        "On one CPU core four blocks of CaiT with 224 pixel images take, of the time of the faster of two copies of "
        f"themselves, {listed(shares['training'])} in training, and {listed(shares['inference'])} in inference"
    )


@text
def signal_at_init(read: Read) -> str:
    rows = read("signal_at_init")["rows"]
    methods = {row["residual"] for row in rows}
    return f"{len(methods)} residual methods at depths {span((row['depth'] for row in rows), 'd')}"
