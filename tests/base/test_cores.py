"""Threads follow the cores that a process may use, and wait without spinning."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fathoms import machine as cores
from fathoms.comparing.runner import make_slots


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch):
    monkeypatch.setattr(cores, "_affinity", lambda: set(range(8)))


@pytest.mark.parametrize(
    ("groups", "limits", "threads"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "350000 100000"}, 3),
        (
            "0::/a/b",
            {"cpu.max": "max 100000", "a/cpu.max": "200000 100000", "a/b/cpu.max": "600000 100000"},
            2,
        ),
        ("0::/gone", {"cpu.max": "50000 100000"}, 1),
        ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu:/\n2:cpuset:/x", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("0::/", {"cpu.max": "nonsense"}, 8),
    ],
    ids=["v2 free", "v2 quota", "v2 nested", "v2 container", "v1 quota", "v1 free", "unreadable"],
)
def test_a_quota_of_control_groups_limits_the_threads(tmp_path, groups, limits, threads):
    write(tmp_path, "proc/self/cgroup", groups + "\n")
    for name, text in limits.items():
        write(tmp_path, f"sys/fs/cgroup/{name}", text + "\n")
    assert cores.compute_threads(root=tmp_path) == threads


def test_hyperthreads_of_a_core_count_once(tmp_path):
    for core in range(8):
        pair = f"{core % 4},{core % 4 + 4}\n"
        write(tmp_path, f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", pair)
    assert cores.compute_threads(root=tmp_path) == 4
    assert cores.compute_threads(jobs=3, root=tmp_path) == 1


def test_settings_that_the_user_gave_stay(monkeypatch):
    monkeypatch.setattr(cores, "compute_threads", lambda jobs=1: 6 // jobs)
    assert cores.openmp_settings({}) == {"OMP_NUM_THREADS": "6", **cores.PASSIVE}
    given = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "ACTIVE"}
    assert cores.openmp_settings(given) == {"KMP_BLOCKTIME": "0", **given}


def test_workers_of_a_comparison_share_the_cores(monkeypatch):
    monkeypatch.setattr(cores, "quota", lambda *_: None)
    monkeypatch.setattr(cores, "_siblings", lambda core, *_: str(core))
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    slots = make_slots(0, [], 1)
    assert [(slot["OMP_NUM_THREADS"], slot["OMP_WAIT_POLICY"]) for slot in slots] == [("2", "PASSIVE")] * 4


def test_the_command_sets_the_threads_before_torch_is_imported():
    code = (
        "import sys; from fathoms.cli import main; main.main = lambda: print('torch' in sys.modules)\n"
        "try: main.command()\nexcept SystemExit: import os; print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "PASSIVE"], done.stderr
