"""The page of scores from elsewhere: the answer, every verdict, the picture and the table."""

from __future__ import annotations

from pathlib import Path

from fathoms.comparing.scores import Judgement
from fathoms.files import write_atomic
from fathoms.report.html import embedded_figure, fill


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
