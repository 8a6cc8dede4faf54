"""Comparison folders with planted numbers, as `fathoms compare` leaves them, without training anything."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import random

from PIL import Image

from fathoms.models.zoo import model_config
from fathoms.training.job import Job
from fathoms.training.recipe import Recipe
from fathoms.training.run_folder import to_toml


def write_run(
    folder, *, options=None, seed=0, epochs=4, score=80.0, status="done", probes=0, blocks=3, **summary
):
    """A run folder with curves that end near `score`."""
    folder.mkdir(parents=True)
    options = options or {}
    model = {"name": "vit", "depth": blocks, **{key: value for key, value in options.items() if key != "lr"}}
    config = {"data": "photos", "seed": seed, "classes": ["cat", "dog"], "model": model}
    (folder / "config.toml").write_text(
        to_toml({**config, "recipe": {"lr": float(options.get("lr", 0.003))}})
    )
    versions = {"torch": "2.15", "fathoms": "0.1", "commit": "0123456789abcdef" * 2 + "01234567"}
    (folder / "environment.json").write_text(
        json.dumps({"python": "3.11", "gpu": "H200", "versions": versions})
    )
    noise, rows = random.Random(f"{folder.name}{seed}"), []
    for epoch in range(epochs):
        share = 1 - math.exp(-4 * (epoch + 1) / epochs)
        top1 = score * share + noise.uniform(-0.5, 0.5)
        base = {
            "epoch": epoch + 1,
            "step": 10 * epoch + 10,
            "top1": top1,
            "loss": 3 - 2.5 * share,
            "top5": 99.0,
        }
        rows.append({**base, "split": "train", "lr": 1e-3, "images_per_second": 900.0 + noise.uniform(0, 90)})
        rows.append({**base, "split": "val"})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if probes:
        (folder / "probe.jsonl").write_text("".join(_probe(at, blocks, noise) for at in range(1, probes + 1)))
    if status in ("done", "diverged"):
        last = {"top1": score, "loss": 0.5, "images": 500}
        table = {"status": status, "reason": None, "best": {**last, "epoch": epochs - 1}, "last": last}
        table |= {
            "seconds": 60.0 + noise.uniform(0, 9),
            "parameters": 5_700_000,
            "peak_memory": 2_000_000_000,
        }
        (folder / "summary.json").write_text(json.dumps(table | {"epoch": epochs, "updates": 40} | summary))
    return folder


def write_details(folder, name="x"):
    """Files that a run records beside its metrics; untrusted texts are `name`."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16), "red").save(file, "PNG")
    png = base64.b64encode(file.getvalue()).decode()
    start = {"time": "2026-01-02T03:04:05+00:00", "host": name, "folder": name}
    start["command"] = ["fathoms", "train", name, "--norm", "learnable_scaler", "--depth", "36"]
    machine = {"version": 2, "gpu": "H200", "gpu_memory": 150e9, "memory": 2e12, "cores": 16, "threads": 8}
    machine |= {"commit": "0123456789abcdef" * 2 + "01234567", "processor": name, "starts": [start, start]}
    (folder / "environment.json").write_text(json.dumps(machine))
    row = {"version": 2, "update": 1, "loss": [3.0, 2.0, 1.5] * 40, "gradient_norm": [1.0, None, 0.5] * 40}
    (folder / "updates.jsonl").write_text(json.dumps(row) + "\n")
    event = {"version": 2, "kind": "not_finite", "act": "skip", "epoch": 1, "update": 3, "loss": None}
    event |= {"cause": {"layer": "blocks.1.mlp", "gradient": None, "files": [name, "b.jpg"]}}
    (folder / "guard.jsonl").write_text(json.dumps(event) + "\n")
    evaluation = {"version": 2, "split": "test", "confusion": [[0, 0, 6], [0, 1, 2], [1, 1, 8]]}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    shown = [{"name": name, "label": i % 2, "top": [[1, 0.9], [0, 0.1]], "png": png} for i in range(12)]
    (folder / "examples.json").write_text(json.dumps({"version": 2, "examples": shown}))
    return folder


def _probe(step, blocks, noise):
    sites = [
        {"block": f"blocks.{i // 2}", "branch": ("attn", "mlp")[i % 2], "stream": 1.0 + i, "added": 0.5}
        | {"ratio": 0.1 * step, "gradient": 10.0 ** -(i / blocks) * noise.uniform(0.5, 2), "weights": 0.2}
        for i in range(2 * blocks)
    ]
    return json.dumps({"epoch": 0, "step": step, "sites": sites}) + "\n"


def write_comparison(folder, arms, *, seeds=3, epochs=4, probes=3, lost=(), tuning=None, grown=()):
    """A comparison: `arms` are names with settings and mean scores, `lost` are (arm, seed, status)."""
    rows, timings, noise = [], {}, random.Random(0)
    gone = {(name, seed): status for name, seed, status in lost}
    for index, (name, (options, mean)) in enumerate(arms.items()):
        for seed in range(seeds):
            run, status = f"arm{index}-seed{seed}", gone.get((name, seed), "done")
            score = mean + noise.uniform(-1, 1)
            write_run(
                folder / "cells" / run,
                options=options,
                seed=seed,
                epochs=epochs,
                score=score,
                status=status,
                probes=probes if seed == 0 else 0,
            )
            ended = status in ("done", "stalled")
            rows.append({"arm": options, "name": name, "seed": seed, "status": status, "split": "val"})
            rows[-1] |= {
                "top1": score if ended else None,
                "loss": 0.5 if ended else None,
                "run": f"cells/{run}",
            }
            rows[-1] |= {
                "reason": None if ended else "not a finite number, first in the output of blocks.1.mlp"
            }
            times = {
                "training_seconds": 60.0 + index,
                "images_per_second": 900.0,
                "peak_memory": 2e9 + 1e8 * index,
            }
            timings[run] = times
    plan = {
        "command": ["compare", "photos", "--axis", "norm=a,b", "--seeds", str(seeds), "--epochs", str(epochs)]
    }
    plan |= {
        "base": _shared([options for options, _ in arms.values()], epochs),
        "data": "photos",
        "fingerprint": "f" * 128,
    }
    plan |= {"images": 500, "classes": 10, "metric": "top1", "margin": 2.0, "floor": 1.0, "baseline": None}
    plan |= {"version": 1, "paired": False, "seeds": seeds, "grown": list(grown)}
    plan["arms"] = {name: options for name, (options, _) in arms.items()}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "results.json").write_text(json.dumps(_results(arms, rows)))
    (folder / "timings.json").write_text(json.dumps(timings))
    if tuning is not None:
        (folder / "tuning.json").write_text(json.dumps(tuning))
    return folder


def _shared(options, epochs):
    """The settings of all arms: those of the default model, and of no recipe but the epochs."""
    model = "vit_small_patch16_224"
    base = Job("photos", model, model_config(model), Recipe(epochs=max(1, epochs))).identity()
    varied = {name for own in options for name in own}
    for key in ("config", "recipe"):
        base[key] = {name: value for name, value in base[key].items() if name not in varied}
    return {key: value for key, value in base.items() if key not in ("data", "seed")}


def _results(arms, rows):
    names, verdicts = list(arms), []
    for a, b in itertools.pairwise(names):
        gap = arms[a][1] - arms[b][1]
        word = "not separated" if abs(gap) < 2 else "a better" if gap > 0 else "b better"
        verdicts.append(
            {"a": a, "b": b, "difference": gap, "low": gap - 1.5, "high": gap + 1.5, "p": 0.01, "n": 3}
        )
        verdicts[-1] |= {"verdict": word, "sentence": f"{a} and {b}: {word}"}
    best = max(names, key=lambda name: arms[name][1])
    table = [{"name": name, "mean": mean, "mean_with_diverged": mean} for name, (_, mean) in arms.items()]
    answer = f"{best} leads with a mean top1 of {arms[best][1]:.2f} over 3 seeds"
    common = {"version": 1, "metric": "top1", "margin": 2.0, "answer": answer}
    return {**common, "arms": table, "cells": rows, "verdicts": verdicts}


GRID = {
    f"norm={norm}, depth={depth}": ({"norm": norm, "depth": str(depth)}, mean)
    for norm, depth, mean in (("ln", 12, 80.0), ("ln", 24, 84.0), ("dyt", 12, 77.0), ("dyt", 24, 70.0))
}
"""Two norms by two depths; the first is best with 24 blocks."""
