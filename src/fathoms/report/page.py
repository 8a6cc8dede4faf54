"""The report page of a run, a comparison or a set of runs: one HTML file that loads nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fathoms.errors import ConfigError
from fathoms.files.atomic import write_atomic
from fathoms.report.comparison.figures import write_figures
from fathoms.report.comparison.files import is_comparison, read_comparison, read_runs
from fathoms.report.comparison.page import render_comparison
from fathoms.report.run.files import read_run
from fathoms.report.run.page import render_run

FILE = "report.html"
_HEAD = (
    b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    b'<meta http-equiv="Content-Security-Policy" content="default-src &#39;none&#39;; style-src &#39;sha256-'
)
"""How every page of these begins."""


def render(folders: Sequence[Path], live: bool = False) -> str:
    """The page of one run folder, one comparison, or several run folders together."""
    if len(folders) == 1:
        folder = folders[0]
        if is_comparison(folder):
            return render_comparison(read_comparison(folder), live)
        if (folder / "config.toml").is_file() or not folder.is_dir():
            return render_run(read_run(folder), live)
    return render_comparison(read_runs(folders), live)


def foreign_page(folders: Sequence[Path]) -> Path | None:
    """A report.html at the default place that is not one of these pages; None in a run folder or a comparison."""
    alone = len(folders) == 1
    if alone and (is_comparison(folders[0]) or (folders[0] / "config.toml").is_file()):
        return None
    target = folders[0] / FILE if alone else Path(FILE)
    try:
        with target.open("rb") as file:
            ours = file.read(len(_HEAD)) == _HEAD
    except OSError:
        ours = not target.exists()
    return None if ours else target


def write_report(folder: Path | Sequence[Path], target: Path | None = None) -> Path:
    """Write the report page and return its path.

    It goes to `target`; without one, to report.html in the folder, or in the working folder for several. A comparison
    also gets its figures as SVG files, in `figures/`.
    """
    folders = [folder] if isinstance(folder, Path) else list(folder)
    planned = read_comparison(folders[0]) if len(folders) == 1 and is_comparison(folders[0]) else None
    text = render(folders) if planned is None else render_comparison(planned)
    if target is None:
        target = folders[0] / FILE if len(folders) == 1 else Path(FILE)
    try:
        write_atomic(target, text.encode(errors="replace"))
        if planned is not None:
            write_figures(folders[0], planned)
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror}); give another --output") from error
    return target
