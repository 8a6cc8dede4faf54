"""Inside 24 blocks on CIFAR-10, before and after training: LayerScale's ratios, Dual PatchNorm's ln0, probing's price.

    python benchmarks/probe_cifar.py cifar10.npz --output results/probe_cifar

Under three minutes on an H200. It trains through `fathoms train` as anybody would, with the speed that is
chosen there: residual=none three times (without probing, every 50 updates, and as often as the default allows), which
must end in the same bits; residual=layerscale, from CaiT's 1e-5; and stem_norm=dual on patches of 8 pixels. Each
stage is written as it ends: numbers.json, README.md and the pictures. `--tiny` shows on a CPU that the script works.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import json
import platform
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from doc_probe import page
from fathoms.cli.main import main as fathoms
from fathoms.cli.targets import load_images, load_target
from fathoms.files.jsonl import read_lines
from fathoms.models.vit import ViT
from fathoms.probes.pictures.over_time import trajectory_picture
from fathoms.probes.pictures.plot import Panel, Series, grid_of
from fathoms.probes.pictures.weights import pixel_scale_picture
from fathoms.probes.signal import Signal, probe
from fathoms.train import loop
from fathoms.train.record import probing

SEED = 0
BASE = (
    *("--recipe", "cifar", "--dim", "192", "--heads", "3", "--depth", "24", "--patch-size", "4"),
    *("--opt", "adamw", "--lr", "1e-3", "--weight-decay", "0.05", "--position", "learned"),
    *("--qk-norm", "none", "--seed", str(SEED), "--checkpoint-hist", "1"),
)
TINY = ("--dim", "32", "--heads", "1", "--depth", "4", "--batch-size", "64", "--device", "cpu")
SETTLED = 4.0
"""Seconds before the default's first probe here; a run that anybody would wait for has 60."""
EVERY = 50
MEASURED: list[probing.Probing] = []


class TimedProbing(probing.Probing):
    """Probing whose time can be read after the run."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        MEASURED.append(self)


def train(root: Path, name: str, args: argparse.Namespace, words: tuple[str, ...]) -> dict[str, Any]:
    """One run of `fathoms train`: its summary, speed, time, and a hash of every weight at its end."""
    torch._dynamo.reset()
    gc.collect()
    MEASURED.clear()
    words = (*BASE, *(TINY if args.tiny else ()), *words)
    said, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(said):
        code = fathoms(["train", args.data, *words, "--output", str(root), "--experiment", name, "--json"])
    if code:
        raise SystemExit(f"{name}: exit code {code}: {said.getvalue()[-2000:]}")
    summary = json.loads(said.getvalue().splitlines()[-1])
    target, spent = load_target(str(root / name), None, {}), MEASURED[-1].spent
    made = {
        "command": " ".join(("fathoms train DATA", *words)),
        "top1": summary["test"]["top1"] if summary["test"] else summary["last"]["top1"],
        "updates": summary["updates"],
        "training_seconds": round(summary["seconds"], 2),
        "wall_seconds": round(time.monotonic() - began, 1),
        "speed": speed_of(root / name),
        "probes": len(read_lines(root / name / "probe.jsonl")),
        "probing_seconds": round(spent, 3),
        "probing_share": round(spent / summary["seconds"], 4),
        "weights": hashlib.sha256(
            b"".join(x.detach().numpy().tobytes() for _, x in sorted(target.model.state_dict().items()))
        ).hexdigest(),
        "losses": hashlib.sha256((root / name / "updates.jsonl").read_bytes()).hexdigest(),
    }
    print(f"{name}: {json.dumps(made)}", flush=True)
    return made


def speed_of(folder: Path) -> dict[str, str]:
    """Precision, compilation and launch that the run chose."""
    speed = tomllib.loads((folder / "config.toml").read_text())["speed"]
    return {key: speed[key] for key in ("precision", "torchcompile", "compile_scope", "launch")}


def same_bits(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether probing changed a bit of losses or weights, on which path, and what it took."""
    names = ("none", "none_probed", "none_default")
    mine = [runs[name] for name in names if name in runs]
    return {
        "runs": [name for name in names if name in runs],
        "losses_equal": len({run["losses"] for run in mine}) == 1,
        "weights_equal": len({run["weights"] for run in mine}) == 1,
        "repeats_without_probing": "none_again" not in runs
        or runs["none_again"]["weights"] == runs["none"]["weights"],
        "speed": mine[0]["speed"],
        "share_of_default": mine[-1]["probing_share"],
        "settled_seconds": SETTLED,
        "interval": EVERY,
    }


def sides(folder: Path, data: str, images: int) -> tuple[Signal, Signal]:
    """A run's model probed at initialisation and after training, on the same held-out images."""
    target = load_target(str(folder), None, {})
    batch = load_images(target, data, images)
    # As the run drew them.
    torch.manual_seed(SEED)
    initial = ViT(target.config)
    return probe(initial, *batch), probe(target.model, *batch)


def uniformity(signal: Signal) -> dict[str, Any]:
    """The ratio of each block and branch, and how even it is: deviation over mean, largest over smallest."""
    found = {}
    for branch in ("attn", "mlp"):
        ratios = [float(value) for value in signal.column("ratio", branch) if value is not None]
        found[branch] = {
            "ratio": [float(f"{value:.5g}") for value in ratios],
            "mean": statistics.mean(ratios),
            "variation": statistics.pstdev(ratios) / statistics.mean(ratios),
            "spread": max(ratios) / min(ratios),
        }
    return found


def ratio_picture(ratios: dict[str, dict[str, Any]]) -> Any:
    """Branch over stream by block: attention and MLP, at initialisation and after training, a line per arm."""
    panels = []
    for when, title in (("initial", "at initialisation"), ("trained", "after training")):
        for branch, name in (("attn", "Attention"), ("mlp", "MLP")):
            lines = [
                Series(arm, list(enumerate(found[when][branch]["ratio"])), place)
                for place, (arm, found) in enumerate(ratios.items())
            ]
            panels.append(Panel(f"{name} over stream, {title}", "block", lines, log_y=True))
    picture = grid_of(panels, "What a branch adds over what it is added to, with and without LayerScale")
    picture.data = ratios
    return picture


def pixel_scale(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The picture of ln0, and its mean in the centre, the corners and elsewhere."""
    target = load_target(str(folder), None, {})
    picture = pixel_scale_picture(target.model)
    assert picture is not None
    scale = np.abs(np.array([channel["scale"] for channel in picture.data]))
    side = scale.shape[-1]
    near, middle = np.zeros(side, bool), np.zeros(side, bool)
    near[: max(side // 4, 1)] = near[side - max(side // 4, 1) :] = True
    middle[side // 4 : side - side // 4] = True
    centre, corner = middle[:, None] & middle[None], near[:, None] & near[None]
    places = {"centre": centre, "corners": corner, "edges": ~(centre | corner)}
    means = {name: float(scale[:, mask].mean()) for name, mask in places.items()}
    # The standard error of a mean over the pixels of the smallest place, to read the differences by.
    noise = float(scale.std() / np.sqrt(3 * corner.sum()))
    return picture, {"side": side, **means, "least": float(scale.min()), "largest": float(scale.max())} | {
        "noise": noise
    }


def save(folder: Path, name: str, picture: Any) -> None:
    """A picture as SVG and PNG, its numbers as JSON; nothing where there is none."""
    if picture is not None:
        for ending in (".svg", ".png", ".json"):
            picture.save(folder / f"{name}{ending}")


def redraw(folder: Path) -> int:
    """The picture of the ratios and README.md again, from numbers.json."""
    kept = json.loads((folder / "numbers.json").read_text())
    save(folder, "ratios", ratio_picture(kept["ratios"]))
    (folder / "README.md").write_text(page(kept))
    return 0


def main() -> int:
    """Train, probe and write, stage by stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", help="CIFAR-10 as an .npz file")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results" / "probe_cifar")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--dual-epochs", type=int, default=24)
    parser.add_argument("--images", type=int, default=256, help="of each probe before and after training")
    parser.add_argument(
        "--redraw", action="store_true", help="draw and write again what the output folder holds"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    if args.redraw:
        return redraw(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    loop.Probing, probing.SETTLED = TimedProbing, SETTLED
    if args.tiny:
        # Tiny runs are over before the first probe of the default.
        probing.SETTLED, probing.FEWEST = 0.5, 20
    began = time.monotonic()
    kept: dict[str, Any] = {
        "command": f"python benchmarks/probe_cifar.py DATA --epochs {args.epochs} --dual-epochs {args.dual_epochs}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "seed": SEED,
        "runs": {},
        "ratios": {},
    }

    def write() -> None:
        kept["seconds"] = round(time.monotonic() - began, 1)
        (args.output / "numbers.json").write_text(json.dumps(kept, indent=1) + "\n")
        (args.output / "README.md").write_text(page(kept))

    def run(name: str, *words: str, epochs: int = args.epochs) -> Path:
        words = (*words, "--epochs", str(epochs), "--eval-interval", str(epochs))
        kept["runs"][name] = train(Path(scratch), name, args, words)
        write()
        return Path(scratch) / name

    with tempfile.TemporaryDirectory() as scratch:
        for arm in ("none", "layerscale"):
            probed = "none_probed" if arm == "none" else arm
            folder = run(probed, "--residual", arm, "--probe-interval", str(EVERY))
            initial, trained = sides(folder, args.data, args.images)
            kept["ratios"][arm] = {"initial": uniformity(initial), "trained": uniformity(trained)}
            save(args.output, f"training_{arm}", trajectory_picture(read_lines(folder / "probe.jsonl")))
            write()
        save(args.output, "ratios", ratio_picture(kept["ratios"]))
        dual = ("--residual", "none", "--stem-norm", "dual", "--patch-size", "8")
        folder = run("dual", *dual, "--probe-interval", "0", epochs=args.dual_epochs)
        picture, kept["ln0"] = pixel_scale(folder)
        save(args.output, "ln0", picture)
        write()
        run("none", "--residual", "none", "--probe-interval", "0")
        run("none_default", "--residual", "none")
        if len({kept["runs"][name]["weights"] for name in ("none", "none_probed", "none_default")}) > 1:
            # Whether two runs without probing are the same is then the question.
            run("none_again", "--residual", "none", "--probe-interval", "0")
        kept["same_bits"] = same_bits(kept["runs"])
        write()
    print(page(kept))
    return 0 if kept["same_bits"]["losses_equal"] and kept["same_bits"]["weights_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
