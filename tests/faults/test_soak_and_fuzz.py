"""Short runs of benchmarks/soak.py and benchmarks/fuzz.py, and proof that they detect faults."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(name, *words):
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *words, "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_a_run_killed_twice_ends_as_the_undisturbed_one():
    code, report = script("soak", "--kills", "2", "--seed", "3")
    assert (code, report["kills"], report["faults"]) == (0, 2, []), report
    assert report["equal bit for bit"]
    assert report["unusable checkpoints"] == 0


def test_mutated_files_are_read_or_refused_and_nothing_else():
    code, report = script("fuzz", "--cases", "400", "--seed", "1")
    assert (code, report["findings"]) == (0, [])
    assert all(target["cases"] == 50 for target in report["targets"].values())
    # A mutation that never leaves a readable file would test one `if` over and over.
    assert all(target["refused"] > 5 for target in report["targets"].values())
    assert sum(target["accepted"] for target in report["targets"].values()) > 15


@pytest.fixture
def soak():
    return module("soak")


def test_the_soak_sees_a_flipped_bit_a_missing_file_and_a_lost_row(soak, tmp_path):
    for name in ("whole", "killed"):
        for kept in ("last", "best"):
            folder = tmp_path / name / "checkpoints" / kept
            folder.mkdir(parents=True)
            files = {f"{part}.safetensors": b"12345678" for part in ("model", "ema", "optimizer")}
            files["state.json"] = b'{"updates": 3, "seconds": 1.0}'
            for file, data in files.items():
                (folder / file).write_bytes(data)
            hashes = {file: soak.hashlib.sha256(data).hexdigest() for file, data in files.items()}
            (folder / "manifest.json").write_text(json.dumps(hashes))
        (tmp_path / name / "metrics.jsonl").write_text('{"epoch": 0}\n{"epoch": 1}\n')
        (tmp_path / name / "summary.json").write_text('{"status": "done", "seconds": 2}')
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    last = killed / "checkpoints" / "last"
    assert soak.differences(whole, killed) == []
    assert soak.look(killed / "checkpoints") == (2, [], 3)
    (killed / "metrics.jsonl").write_text('{"epoch": 0}\n')
    (last / "ema.safetensors").write_bytes(b"12345679")
    assert soak.differences(whole, killed) == ["checkpoints/last/ema.safetensors", "metrics.jsonl"]
    assert soak.fault(last) == "ema.safetensors has another sha256"
    assert soak.fault(last, ("model", "optimizer")) == "ema.safetensors has another sha256"
    (last / "model.safetensors").unlink()
    assert soak.look(killed / "checkpoints")[1]


class Careless:
    """A reader with every fault that the fuzzer looks for."""

    good = b""

    def make(self, rng):
        return bytes([rng.randrange(3)])

    def read(self, data):
        if data == b"\x00":
            raise KeyError("escaped")
        if data == b"\x01":
            Path("stray").touch()
        elif data:
            while True:
                pass


def test_the_fuzzer_sees_an_escaped_error_a_hang_and_a_stray_file(tmp_path, monkeypatch):
    fuzz = module("fuzz")
    monkeypatch.setattr(fuzz, "TARGETS", {"careless": lambda _folder: Careless()})
    monkeypatch.setattr(fuzz, "HANG", 0.05)
    report = fuzz.in_child("careless", 0, 12, 0, tmp_path)
    what = " ".join(finding["what"] for finding in report["findings"])
    assert "KeyError" in what
    assert "hang: more than 0.05 s" in what
    assert "stray file" in what


def test_the_fuzzer_names_the_case_at_which_the_process_died(tmp_path, monkeypatch):
    fuzz = module("fuzz")

    class Fatal(Careless):
        def read(self, data):
            if data == b"\x00":
                fuzz.os.kill(fuzz.os.getpid(), fuzz.signal.SIGKILL)

    monkeypatch.setattr(fuzz, "TARGETS", {"fatal": lambda _folder: Fatal()})
    report = fuzz.in_child("fatal", 0, 12, 0, tmp_path)
    made = {case: Fatal().make(fuzz.random.Random(f"0/fatal/{case}")) for case in range(12)}
    fatal = [case for case, data in made.items() if data == b"\x00"]
    assert [finding["case"] for finding in report["findings"]] == fatal
    assert 1 < len(fatal) < 11
    assert all("the process ended with -9" in finding["what"] for finding in report["findings"])
    # Those before and after a death are counted as what they were.
    assert (report["accepted"], report["refused"]) == (12 - len(fatal), 0)


def test_the_fuzzer_stops_where_not_even_the_good_file_is_read(tmp_path, monkeypatch, capfd):
    fuzz = module("fuzz")

    class Broken(Careless):
        def read(self, _data):
            raise KeyError("from the start")

    monkeypatch.setattr(fuzz, "TARGETS", {"broken": lambda _folder: Broken()})
    with pytest.raises(RuntimeError, match="broken: the undamaged file cannot be read"):
        fuzz.in_child("broken", 0, 6, 0, tmp_path)
    assert "from the start" in capfd.readouterr().err
