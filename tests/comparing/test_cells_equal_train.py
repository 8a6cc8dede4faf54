"""A cell is `fathoms train` with its own settings, bit for bit, whatever its worker ran before."""

import hashlib
import json
import random
import subprocess
import sys

import pytest

from fathoms.comparing import comparison as module

CLOCK = ("images_per_second", "seconds", "folder")


def result_of(run):
    """Hashes of the weights and moments, the metrics, and the summary without what depends on the clock."""
    files = sorted((run / "checkpoints" / "last").glob("*.safetensors"))
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in (*lines, json.dumps(json.loads((run / "summary.json").read_text())))]
    assert hashes
    return hashes, [{key: value for key, value in row.items() if key not in CLOCK} for row in rows]


@pytest.mark.slow
def test_a_cell_equals_train_whatever_its_worker_ran_before(comparisons, monkeypatch):
    def shuffled(cells, _gpus):
        listed = list(cells)
        random.Random(1).shuffle(listed)
        return listed

    monkeypatch.setattr(module, "order", shuffled)
    arms = ("--arm", "ln: norm=layernorm", "--arm", "deep: norm=dyt,depth=4,drop_path=0.2,lr=0.002")
    assert comparisons.run(*arms, "--seeds", "2", "--jobs", "1") == 0
    rows = comparisons.rows()
    assert sorted(row["name"] for row in rows) == ["deep", "deep", "ln", "ln"]
    began = [comparisons.folder() / row["run"] / "config.toml" for row in rows]
    order = [path.stat().st_mtime_ns for path in began]
    assert order != sorted(order)
    for row in rows:
        own = [word for key, value in row["arm"].items() for word in (f"--{key.replace('_', '-')}", value)]
        words = [*comparisons.words(name=f"{row['name']}-{row['seed']}"), "--seed", str(row["seed"]), *own]
        line = [sys.executable, "-m", "fathoms", "train", *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        alone = comparisons.folder(f"{row['name']}-{row['seed']}")
        assert result_of(comparisons.folder() / row["run"]) == result_of(alone)
