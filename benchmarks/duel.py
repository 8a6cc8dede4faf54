"""`fathoms train` beside the train.py of LearnableScaler's author and timm's: settings, batches, draws, then seeds.

    python benchmarks/duel.py settings --author CLONE --timm CLONE --images SMALL --line scaler
    python benchmarks/duel.py batches --author CLONE --timm CLONE --images SMALL --line scaler
    python benchmarks/duel.py draws --author CLONE --images LARGE
    python benchmarks/duel.py seeds --author CLONE --timm CLONE --images LARGE --line scaler --seeds 5 --jobs 8
    python benchmarks/duel.py page                                                  # writes results/duel.md

The clones are folders with a train.py and the timm beside it: github.com/nghiemtuan/LearnableScaler and
github.com/huggingface/pytorch-image-models. They are run as they are (duel_peer.py), never copied. SMALL and LARGE are
folders train/CLASS, val/CLASS of ten classes. A finished run is kept in results/duel.json and not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
SIDES = ("peer", "fathoms")
PARTS = ("settings", "batches", "draws", "seeds")
DRAWN_EPOCHS = 10

AUTHOR = (
    "--weight-decay 0.02 --opt lamb --aa rand-m7-mstd0.5 --warmup-epoch 0 --sched custom --mixup 0.1 --cutmix 1 "
    "--batch-size 50 --workers 1 --clip-grad 14 --grad-accum-steps 2 --lr 0.005 --epoch-factor 0.8 "
    "--epoch-threshold 0.5 --train-feature-decay 0.1 --attn-extra-loss 0.03 --attn-extra-loss-layers 6"
)
TIMM = (
    "--opt adamw --lr 1e-3 --weight-decay .05 --sched cosine --warmup-epochs 2 --warmup-lr 1e-6 --min-lr 1e-5 "
    "--drop-path .1 --model-ema --model-ema-decay .97 --smoothing .1 --aa rand-m9-mstd0.5-inc1 --color-jitter .3 "
    "--reprob .25 --mixup .8 --cutmix 1 --clip-grad 1 --batch-size 50 --workers 1"
)


@dataclass(frozen=True)
class Line:
    """One command line for both programs: the peer that it is of, its model, its words and its epochs."""

    peer: str
    model: str
    words: str
    epochs: int
    side: int = 48


LINES = {
    "scaler": Line("author", "vit_learnable_scaler_embed_dim192_patch16_head3_depth12", AUTHOR, 8),
    "layernorm": Line("author", "vit_tiny_patch16_224", AUTHOR, 8),
    "deit": Line("timm", "vit_tiny_patch16_224", TIMM, 6),
}
"""The seed's line with its norm and with LayerNorm, and the flags that DeiTs are trained with in timm."""


def words_of(name: str, epochs: int, seed: int, output: Path) -> list[str]:
    """What both programs are given, after their data."""
    line = LINES[name]
    given = f"--model {line.model} --img-size {line.side} --epochs {epochs} --seed {seed} --experiment run"
    return [*given.split(), *line.words.split(), "--output", str(output)]


def peer_command(folder: Path, notes: str, stop: str, images: Path, words: list[str], side: int) -> list[str]:
    """The peer's run; its head and its positions do not follow the data, and timm's wants CUDA unless it is told."""
    script = str(Path(__file__).with_name("duel_peer.py"))
    own = ["--num-classes", "10", "--model-kwargs", f"img_size={side}"]
    if "'--device'" in (folder / "train.py").read_text():
        own += ["--device", "cpu"]
    return [sys.executable, script, str(folder), notes, stop, str(images), *words, *own]


def noted(folder: Path, name: str, images: Path, stop: str, epochs: int) -> tuple[dict[str, Any], list[Any]]:
    """What the peer resolved and did, and its summary.csv."""
    import torch

    line = LINES[name]
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        words = words_of(name, epochs, 42, place)
        command = peer_command(folder, str(place / "notes"), stop, images, words, line.side)
        result = subprocess.run(command, capture_output=True, text=True)
        if not (place / "notes").exists() or result.returncode:
            sys.exit(f"{name}: the peer failed\n{result.stderr[-2000:]}")
        # The notes hold numpy's numbers, and were written a moment ago by duel_peer.py.
        notes = torch.load(place / "notes", weights_only=False)
        return notes, evaluations("peer", place)


def trainer_of(name: str, images: Path, epochs: int, output: Path) -> Any:
    """The same words as a Trainer of fathoms."""
    import torch

    from fathoms.cli import train
    from fathoms.cli.flags.parse import parse
    from fathoms.training.distributed import World
    from fathoms.training.run import Trainer

    words = [str(images), *words_of(name, epochs, 42, output), "--device", "cpu"]
    job = train.make_job(parse(train, "train", words))
    return Trainer(job, World(0, 1, torch.device("cpu")), show=False)


def resolved(trainer: Any) -> dict[str, Any]:
    """What fathoms resolved, in the form of the peer's notes."""
    from fathoms.models.weight_names import to_timm

    model, context = trainer.model, trainer.context
    pixels = context.data.preprocessing.to_dict()
    return {
        "args": context.job.recipe.to_dict(),
        "pixels": {**pixels, "input_size": (3, model.config.image_size, model.config.image_size)},
        "optimizer": type(trainer.learner.optimizer).__name__,
        "groups": trainer.learner.optimizer.param_groups,
        "drop_path": [getattr(block.attn_join.drop_path, "rate", 0.0) for block in model.blocks],
        "state": to_timm({key: value.clone() for key, value in model.state_dict().items()}, model.config),
        "batches_per_epoch": context.data.train.batches,
        "transforms": str(context.data.train.augment.ranges),
    }


Setting = tuple[str, str, str]


def settings(peer: Mapping[str, Any], own: Mapping[str, Any]) -> list[Setting]:
    """Every setting that can be read off both, in words."""
    rows = [(f"--{key.replace('_', '-')}", peer["args"][key], own["args"][key]) for key in common(peer, own)]
    pixels = ("mean", "std", "crop_pct", "interpolation", "input_size")
    rows += [(f"images: {key}", peer["pixels"][key], own["pixels"][key]) for key in pixels]
    rows += [(key, peer[key], own[key]) for key in ("batches_per_epoch", "drop_path")]
    rows += [("jitter of colours", "ColorJitter" in peer["transforms"], own["transforms"] != "None")]
    for key in ("betas", "eps"):
        values = [sorted({shown(group[key]) for group in side["groups"]}) for side in (peer, own)]
        rows.append((f"optimizer: {key}", *values))
    rows += [("tensors by weight decay", decays(peer["groups"]), decays(own["groups"]))]
    rows += starts(peer["state"], own["state"])
    return [(name, shown(first), shown(second)) for name, first, second in rows]


def common(peer: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Options that both have under one name; pixels are compared as they were resolved."""
    return sorted((peer["args"].keys() & own["args"].keys()) - {"mean", "std", "crop_pct", "interpolation"})


def decays(groups: list[dict[str, Any]]) -> dict[float, int]:
    """The number of tensors under each weight decay."""
    found: dict[float, int] = {}
    for group in groups:
        count = len(group["names"])
        found[group["weight_decay"]] = found.get(group["weight_decay"], 0) + count
    return dict(sorted(found.items()))


def starts(peer: Mapping[str, Any], own: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Names and shapes of all tensors, and the deviation in which each kind starts, where the two are drawn apart."""
    shapes = [{key: tuple(value.shape) for key, value in state.items()} for state in (peer, own)]
    rows: list[tuple[str, Any, Any]] = [
        ("tensors", *(f"{len(s)}, {sum(v.numel() for v in s.values()):,} values" for s in (peer, own))),
        ("names and shapes in timm's layout", "the same", "the same" if shapes[0] == shapes[1] else "other"),
    ]
    for key in peer:
        if key.startswith("blocks.") and not key.startswith("blocks.0."):
            continue
        first, second = (state[key].float().std().item() for state in (peer, own))
        # Two samples of one normal distribution differ by 5 of their standard errors once in a million.
        if abs(first - second) <= 5 * max(first, second) / peer[key].numel() ** 0.5:
            second = first
        rows.append((f"start: deviation of {key}", f"{first:.2g}", f"{second:.2g}"))
    return rows


def shown(value: Any) -> str:
    """A value as both sides would write it: no list beside a tuple, no zero beside a None that means off."""
    if isinstance(value, list | tuple):
        return " ".join(shown(each) for each in value)
    if isinstance(value, dict):
        return ", ".join(f"{count} at {shown(decay)}" for decay, count in value.items())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:.6g}"


def replayed(name: str, images: Path, notes: Mapping[str, Any], epochs: int) -> dict[str, Any]:
    """Fathoms' own trainer on the peer's batches, from its weights, beside what the peer noted."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import fathoms
    from fathoms.data import Batch

    with tempfile.TemporaryDirectory() as made:
        trainer = trainer_of(name, images, epochs, Path(made))
        fathoms.load_weights(trainer.model, notes["state"])
        if trainer.learner.ema is not None:
            fathoms.load_weights(trainer.learner.ema.module, notes["state"])
        loader, count = trainer.context.data.train, notes["batches_per_epoch"]

        def batches(epoch: int, first: int) -> Any:
            for number in range(first, count):
                pixels, targets = notes["batches"][epoch * count + number]
                soft = targets if targets.is_floating_point() else None
                labels = targets if soft is None else soft.argmax(1)
                ids = torch.arange(len(labels))
                yield Batch(pixels.float(), labels, ids, epoch, number, soft)

        loader.epoch = batches
        found: list[tuple[float, float]] = []
        rates: list[float] = []
        log = trainer.loop.updates
        log.add = lambda _, loss, norm: found.append((loss, norm))
        hook = register_optimizer_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
        trainer.run()
        hook.remove()
        own = evaluations("fathoms", Path(made))
    theirs = notes["updates"]
    if len(found) != len(theirs):
        sys.exit(f"{name}: {len(theirs)} updates there, {len(found)} here")
    return {
        "updates": len(found),
        "loss": [[theirs[i]["loss"], found[i][0]] for i in (0, -1)],
        "norm": [[theirs[i]["norm"], found[i][1]] for i in (0, -1)],
        "loss_apart": max(abs(a["loss"] - b[0]) for a, b in zip(theirs, found, strict=True)),
        "norm_apart": max(abs(a["norm"] / b[1] - 1) for a, b in zip(theirs, found, strict=True)),
        "rate_apart": max(abs(a["lr"] - b) for a, b in zip(theirs, rates, strict=True)),
        "evaluations": own,
    }


def drawn(name: str, folder: Path, images: Path, epochs: int) -> dict[str, Any]:
    """The training images that both sides draw, stage by stage, as distributions."""
    from duel_draws import STAGES, compared, measured

    found, line = {}, LINES[name]
    for stage, changes in STAGES.items():
        words = line.words
        for old, new in changes:
            if old not in words:
                sys.exit(f"{name}: its line has no {old!r}; draws are those of the author's line")
            words = words.replace(old, new)
        LINES[name] = replace(line, words=words)
        notes, _ = noted(folder, name, images, "draws", epochs)
        with tempfile.TemporaryDirectory() as made:
            loader = trainer_of(name, images, epochs, Path(made)).context.data.train
            own = measured(
                (batch.images, batch.labels if batch.targets is None else batch.targets)
                for epoch in range(epochs)
                for batch in loader.epoch(epoch)
            )
        found[stage] = compared(notes["draws"], own)
    LINES[name] = line
    return found


def evaluations(side: str, output: Path) -> list[dict[str, float]]:
    """Train loss, val loss and top-1 of each epoch of a run."""
    run = output / "run"
    if side == "peer":
        if not (run / "summary.csv").exists():
            return []
        rows = list(csv.DictReader((run / "summary.csv").open()))
        return [
            {
                "train": float(r["train_loss"]),
                "val": float(r["eval_loss"]),
                "top1": float(r["eval_top1"]),
            }
            for r in rows
        ]
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    by_split = {split: [row for row in rows if row["split"] == split] for split in ("train", "val")}
    pairs = zip(by_split["train"], by_split["val"], strict=True)
    return [{"train": first["loss"], "val": then["loss"], "top1": then["top1"]} for first, then in pairs]


def trained(folder: Path, name: str, side: str, seed: int, images: Path) -> list[dict[str, float]]:
    """One run of one side."""
    line = LINES[name]
    with tempfile.TemporaryDirectory() as made:
        words = words_of(name, line.epochs, seed, Path(made))
        if side == "peer":
            command = peer_command(folder, "-", "end", images, words, line.side)
        else:
            command = [sys.executable, "-m", "fathoms", "train", str(images), *words, "--device", "cpu"]
        alone = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **alone})
        found = evaluations(side, Path(made)) if not result.returncode else []
        if not found:
            print(
                f"{name}, {side}, seed {seed} failed:\n{result.stderr[-1500:]}", file=sys.stderr, flush=True
            )
        return found


def kept(file: Path) -> dict[str, Any]:
    """What has been measured."""
    return json.loads(file.read_text()) if file.exists() else {part: {} for part in PARTS}


def keep(file: Path, **parts: Any) -> None:
    """Add to what has been measured."""
    rows = kept(file)
    for part, values in parts.items():
        rows[part] = rows.get(part, {}) | values
    file.write_text(json.dumps(rows, indent=1) + "\n")


def run_seeds(args: argparse.Namespace, folder: Path) -> None:
    """Every seed of both sides that is not there yet."""
    done = kept(args.rows)["seeds"]
    cells = [
        (side, seed)
        for seed in range(1, args.seeds + 1)
        for side in SIDES
        if f"{args.line}/{side}/{seed}" not in done
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        started = [
            (cell, pool.submit(trained, folder, args.line, *cell, args.images.absolute())) for cell in cells
        ]
        for (side, seed), future in started:
            if future.result():
                keep(args.rows, seeds={f"{args.line}/{side}/{seed}": future.result()})


def main() -> None:
    """Measure one part of one line, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "page"))
    parser.add_argument("--line", choices=LINES, default="scaler")
    parser.add_argument("--author", type=Path, help="a clone of nghiemtuan/LearnableScaler")
    parser.add_argument("--timm", type=Path, help="a clone of huggingface/pytorch-image-models")
    parser.add_argument("--images", type=Path, help="a folder train/CLASS, val/CLASS of ten classes")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, a core each")
    parser.add_argument("--rows", type=Path, default=RESULTS / "duel.json", help="where the numbers are kept")
    args = parser.parse_args()
    if args.part == "page":
        from duel_page import page

        (RESULTS / "duel.md").write_text(page(kept(args.rows)))
        return
    folder = getattr(args, LINES[args.line].peer)
    if folder is None or args.images is None:
        parser.error(f"--{LINES[args.line].peer} and --images are needed")
    if args.part == "seeds":
        run_seeds(args, folder.absolute())
    elif args.part == "draws":
        keep(args.rows, draws={args.line: drawn(args.line, folder, args.images, DRAWN_EPOCHS)})
    elif args.part == "settings":
        with tempfile.TemporaryDirectory() as made:
            notes, _ = noted(folder, args.line, args.images, "start", LINES[args.line].epochs)
            own = resolved(trainer_of(args.line, args.images, LINES[args.line].epochs, Path(made)))
        keep(args.rows, settings={args.line: settings(notes, own)})
    else:
        # Drop-path is drawn by each side itself, and a short average would be all warm-up.
        words = LINES[args.line].words.replace("--drop-path .1 ", "").replace("decay .97", "decay .8")
        # At magnitude 9 timm posterizes to 0 bits now and then, which Pillow 13 refuses.
        words = words.replace("rand-m9", "rand-m7")
        LINES[args.line] = replace(LINES[args.line], words=words)
        notes, theirs = noted(folder, args.line, args.images, "end", 3)
        row = replayed(args.line, args.images, notes, 3)
        keep(args.rows, batches={args.line: {**row, "peer_evaluations": theirs}})


if __name__ == "__main__":
    main()
