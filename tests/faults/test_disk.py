"""F10 and F11: a full disk before the start or during the run, a folder that cannot be written or disappears."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import threading

import pytest

from fathoms import FathomsError
from fathoms.cli.main import main
from fathoms.training import checkpoint_files as checkpoints
from fathoms.training.run_folder import DIVERGED
from tiny_runs import before_update, poison


@pytest.fixture
def file_limit():
    """Sets the largest file that this process may write, and restores the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_too_small_a_limit_is_detected_before_the_first_update(tiny_runs, file_limit, capsys):
    file_limit(100_000)
    assert main(["train", *tiny_runs.words()]) == 2
    printed = capsys.readouterr().err
    assert "a checkpoint has a file of 0.4 MB, and the system allows 0.1 MB; raise `ulimit -f`" in printed
    assert printed.count("\n") == 1
    assert not (tiny_runs.folder() / "metrics.jsonl").exists()


def test_a_limit_in_the_middle_keeps_the_old_checkpoint_and_the_same_command_resumes(tiny_runs, file_limit):
    tiny_runs.train(name="whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = tiny_runs.trainer("--recovery-interval", "2")
    before_update(trainer, 5, lambda: (trainer.loop.saver.close(), file_limit(100_000)))
    with pytest.raises(FathomsError, match=r"cannot save: File too large; make room .*last is whole"):
        trainer.run()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert tiny_runs.state()["updates"] == 4
    assert tiny_runs.summary()["status"] == "failed"
    assert checkpoints.why_unusable(tiny_runs.folder() / "checkpoints" / "last") is None
    assert not (tiny_runs.folder() / "checkpoints" / checkpoints.FRESH).exists()
    assert tiny_runs.train("--recovery-interval", "2").code == 0
    assert tiny_runs.same("whole", "run")


FULL = """
import json, shutil, sys, torch
from pathlib import Path
from fathoms.cli.main import main
from fathoms.cli import train as command
from fathoms.cli.flags.parse import parse
from fathoms.training.distributed import World
from fathoms.training.run import Trainer
torch.set_num_threads(1)
root, words, report = Path(sys.argv[1]), sys.argv[2:], {}
trainer = Trainer(command.make_job(parse(command, "train", words)), World(0, 1, torch.device("cpu")), show=False)
update, filler = trainer.loop.update, root / "filler"
place = trainer.context.folder.checkpoints
def fill(left):
    filler.write_bytes(b"")
    free = shutil.disk_usage(root).free - left
    with filler.open("wb") as file:
        file.write(bytes(max(free, 0)))
def counted(batch):
    if trainer.loop.state.updates == 7:
        # Less than one checkpoint is left: older ones must go.
        trainer.loop.saver.wait()
        report["before"] = sorted(path.name for path in place.iterdir())
        fill(200_000)
    if trainer.loop.state.updates == 9:
        trainer.loop.saver.wait()
        report["pruned"] = sorted(path.name for path in place.iterdir())
        report["updates"] = json.loads((place / "last" / "state.json").read_text())["updates"]
        fill(0)
    update(batch)
trainer.loop.update = counted
try:
    trainer.run()
except Exception as error:
    report["error"] = f"{type(error).__name__}: {error}"
report["kept"] = json.loads((place / "last" / "state.json").read_text())["updates"]
filler.unlink()
report["again"] = main(["train", *words])
report["small"] = main(["train", *words[:-1], "1000"])
print(json.dumps(report))
"""


def can_mount():
    tried = ["unshare", "-Urm", "sh", "-c", "mount -t tmpfs -o size=1m none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this user may not mount a small tmpfs")
def test_a_disk_that_fills_up_loses_older_checkpoints_first_and_never_the_last(tiny_runs, tmp_path):
    """A real full tmpfs of 12 MB, in a mount namespace of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    script = tmp_path / "full.py"
    script.write_text(FULL)
    words = tiny_runs.words("--recovery-interval", "2", "--checkpoint-hist", "4")
    words[words.index("--output") + 1] = str(place)
    line = 'mount -t tmpfs -o size=12m none "$1" && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", line, "sh", place, sys.executable, script, place, *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["before"] == ["last", "previous", "update-00000002"]
    assert report["pruned"] == ["best", "last", "previous"]
    assert report["updates"] == 8
    assert "SaveError" in report["error"]
    assert "No space left on device; make room and give the same command again" in report["error"]
    # Making room for the one after eight took the last that could go; the one after ten found none.
    assert report["kept"] == 10
    assert report["again"] == 0
    assert report["small"] == 2
    assert "1002 checkpoints of" in done.stderr


def test_a_folder_that_goes_away_ends_the_run_in_one_line(tiny_runs):
    trainer = tiny_runs.trainer("--recovery-interval", "2")
    before_update(trainer, 5, lambda: (trainer.loop.saver.close(), shutil.rmtree(tiny_runs.folder())))
    with pytest.raises(FathomsError, match="cannot save: the folder is gone; restore it") as ended:
        trainer.run()
    assert "\n" not in str(ended.value)


def test_a_save_that_fails_while_the_run_diverges_is_reported(tiny_runs, monkeypatch, capsys):
    trainer, ended = tiny_runs.trainer("--recovery-interval", "4"), threading.Event()
    end = trainer._end

    def fail(*_args):
        assert ended.wait(60)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints, "save", fail)
    trainer._end = lambda *args: (ended.set(), end(*args))[1]
    trainer.loop.show = True
    poison(trainer, {(0, 4)}, trainer.model.blocks[1].mlp, lambda output: output * float("nan"))
    assert trainer.run().code == DIVERGED
    assert "checkpoints: cannot save: Permission denied; fix it" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_training(tiny_runs, capsys):
    assert main(["train", *tiny_runs.words()[:-1], "run", "--output", "/proc/nowhere"]) == 2
    assert "cannot be written" in capsys.readouterr().err
