"""Comparisons in stretches: ended runs go into one archive, to take them to another machine and go on there."""

from __future__ import annotations

import io
import json
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ENDED = ("done", "stalled", "diverged")
RUN_FOLDERS = ("cells", "tuning")
"""Where a comparison keeps the run folders of its arms and of the trials of their tuning."""
UNFINISHED = 75
"""Exit code of a comparison that has runs left."""
PACK_EVERY = 20.0


def run_packing(
    works: Sequence[Callable[[], None]], stop: Callable[[], None], output: Path, archive: Path | None
) -> None:
    """Do works side by side; every 20 seconds, and at the end, the ended runs go into the archive.

    Args:
        works: Each ends by itself.
        stop: Called on SIGTERM, Ctrl-C and SIGHUP; the works are to end soon after.
        output: Folder of the comparisons.
        archive: The file; None keeps nothing.
    """
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: stop())
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    kept = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        if time.monotonic() - kept > PACK_EVERY:
            pack(output, archive)
            kept = time.monotonic()
    pack(output, archive)


def exit_code(codes: Iterable[int]) -> int:
    """Of several comparisons: the first that is an error, else 75 where runs are left or none began, else 0."""
    known = list(codes)
    wrong = [code for code in known if code not in (0, UNFINISHED)]
    return wrong[0] if wrong else max(known, default=UNFINISHED)


def cells_of(folder: Path) -> list[dict[str, Any]]:
    """The runs of a comparison; none where it has not begun."""
    path = folder / "results.json"
    return json.loads(path.read_text())["cells"] if path.is_file() else []


def has_ended(run: Path) -> bool:
    """Whether a run folder holds a run that came to its end."""
    path = run / "summary.json"
    return path.is_file() and json.loads(path.read_text())["status"] in ENDED


def pack(output: Path, archive: Path | None) -> None:
    """Put the ended runs, without checkpoints, and what is written about them into one file."""
    if archive is None:
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    part = archive.with_name(archive.name + ".part")
    with tarfile.open(part, "w:gz", compresslevel=1) as tar:
        for path in sorted(output.glob("*.log")):
            _add(tar, path, path.name)
        for folder in sorted(path for path in output.iterdir() if path.is_dir()):
            runs = [run for name in RUN_FOLDERS for run in folder.glob(f"{name}/*")]
            ended = {run.relative_to(folder) for run in runs if has_ended(run)}
            for path in sorted(folder.rglob("*")):
                name = path.relative_to(folder)
                run = Path(*name.parts[:2])
                wanted = run in ended if name.parts[0] in RUN_FOLDERS else len(name.parts) == 1
                if path.is_file() and wanted and "checkpoints" not in name.parts:
                    _add(tar, path, f"{folder.name}/{name}")
    part.replace(archive)


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file as it is at one moment: a running comparison replaces its results, and its temporary files vanish."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def unpack(begin: Path | None, output: Path) -> None:
    """Bring back the runs of an archive, unless some are there."""
    output.mkdir(parents=True, exist_ok=True)
    if begin is not None and not any(path.is_dir() for path in output.iterdir()):
        with tarfile.open(begin) as tar:
            tar.extractall(output, filter="data")
