"""The page of a run, a comparison, a set of runs or scores: one HTML file that loads nothing from the network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fathoms.errors import ConfigError
from fathoms.files import write_atomic
from fathoms.report.comparison_page import render_comparison
from fathoms.report.figures import figures, write_figures
from fathoms.report.html import embedded_figure, fill
from fathoms.report.records import (
    ComparisonRecord,
    RunRecord,
    is_comparison,
    read_comparison,
    read_run,
    read_runs,
)
from fathoms.report.run_page import render_run

if TYPE_CHECKING:
    from fathoms.comparing.scores import Judgement

FILE = "report.html"
_HEAD = (
    b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    b'<meta http-equiv="Content-Security-Policy" content="default-src &#39;none&#39;; style-src &#39;sha256-'
)
"""How every page of these begins."""
EVERY = 5
"""Seconds between two looks at the folders that are followed, and between two reloads of their page."""
REST = 3
"""A page that takes long to write rests this many times as long before it is written again."""
READ = (
    "plan.json",
    "results.json",
    "timings.json",
    "tuning.json",
    "config.toml",
    "metrics.jsonl",
    "summary.json",
)
READ += ("probe.jsonl", "failed.json", "updates.jsonl", "guard.jsonl", "evaluation.json", "examples.json")
"""Files that a page shows."""


def read(folders: Sequence[Path]) -> RunRecord | ComparisonRecord:
    """One run folder, one comparison, or several run folders together."""
    if len(folders) == 1:
        folder = folders[0]
        if is_comparison(folder):
            return read_comparison(folder)
        if (folder / "config.toml").is_file() or not folder.is_dir():
            return read_run(folder)
    return read_runs(folders)


def page_of(folders: Sequence[Path]) -> Path:
    """Where the page goes: report.html in the folder, or in the working folder for several."""
    return folders[0] / FILE if len(folders) == 1 else Path(FILE)


def foreign_page(folders: Sequence[Path]) -> Path | None:
    """A report.html at the default place that is not one of these pages; None in a run folder or a comparison."""
    alone = len(folders) == 1
    if alone and (is_comparison(folders[0]) or (folders[0] / "config.toml").is_file()):
        return None
    target = page_of(folders)
    try:
        with target.open("rb") as file:
            ours = file.read(len(_HEAD)) == _HEAD
    except OSError:
        ours = not target.exists()
    return None if ours else target


def write_report(folder: Path | Sequence[Path], target: Path | None = None, reload: int = 0) -> Path:
    """Write the report page and return its path.

    A comparison also gets its figures as SVG files, in `figures/`.

    Args:
        folder: A run, a comparison, or several runs.
        target: The file; None takes `page_of`.
        reload: Seconds after which the page reads its file again; 0: never.
    """
    folders = [folder] if isinstance(folder, Path) else list(folder)
    record, drawn = read(folders), {}
    if isinstance(record, RunRecord):
        text = render_run(record, reload)
    else:
        drawn = figures(record)
        text = render_comparison(record, drawn, reload)
    target = target or page_of(folders)
    try:
        write_atomic(target, text.encode(errors="replace"))
        if isinstance(record, ComparisonRecord) and record.plan:
            write_figures(folders[0], drawn)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}); give another --output") from error
    return target


def follow(folders: Sequence[Path], target: Path | None = None, every: float = EVERY) -> Path:
    """Write a page that reloads itself, and write it again as its files change, until every run has ended.

    The last page, also after Ctrl-C, no longer reloads.
    """
    seen = None
    try:
        while not _ended(read(folders)):
            began, now = time.monotonic(), _stamps(folders)
            if now != seen:
                write_report(folders, target, reload=EVERY)
                seen = now
            time.sleep(max(every, REST * (time.monotonic() - began)))
    except KeyboardInterrupt:
        pass
    return write_report(folders, target)


def _ended(record: RunRecord | ComparisonRecord) -> bool:
    """Whether no run goes on or is still to come."""
    if isinstance(record, RunRecord):
        return record.status != "running"
    begun = bool(record.results) or not record.plan
    return begun and all(cell.status not in ("pending", "running") for cell in record.cells)


def _stamps(folders: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Times and sizes of the files that a page shows."""
    found: dict[Path, tuple[int, int]] = {}
    places = [path for folder in folders for path in (folder, *folder.glob("*"), *folder.glob("cells/*"))]
    for path in (place / name for place in places for name in READ):
        try:
            about = path.stat()
        except OSError:
            continue
        found[path] = (about.st_mtime_ns, about.st_size)
    return found


def write_scores_page(found: Judgement, name: str, page: Path) -> Path:
    """Write the page of a judgement under a name, and return its path."""
    scored = any(arm.scores for arm in found.arms)
    text = fill(
        "scores.html",
        styles=("page.css", "probe.css"),
        scripts=("shared.js",),
        data={},
        name=name,
        best=found.best,
        found=found,
        drawn=embedded_figure("scores", found.plot()) if scored else "",
        table=found.table(),
    )
    write_atomic(page, text.encode(errors="replace"))
    return page
