"""Write the numbers and figures of README, RELIABILITY and docs from results/: `python benchmarks/doc_numbers.py`.

A number stands between `<!-- generated: NAME -->` and `<!-- end -->`, in a line or on lines of its own; NAME is one of
`TEXTS`. `--check` changes nothing and exits 1 if a page would change. Tables of docs/surgery.md that are marked as
written by benchmarks/surgery.py stay with that script.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import doc_claims
import doc_evidence
import doc_many_gpus
import doc_probe
import doc_speed
import doc_where_time_goes
from doc_format import Read, reader

TEXTS: dict[str, Callable[[Read], str]] = {
    **doc_speed.TEXTS,
    **doc_many_gpus.TEXTS,
    **doc_where_time_goes.TEXTS,
    **doc_claims.TEXTS,
    **doc_evidence.TEXTS,
    **doc_probe.TEXTS,
}
ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->(?P<body>.*?)<!-- end -->", re.DOTALL)
OPENING = "<!-- generated:"
WIDTH = 118


def pages(root: Path) -> list[Path]:
    """Every page that may hold generated numbers."""
    return [root / "README.md", root / "RELIABILITY.md", *sorted((root / "docs").glob("*.md"))]


def names_in(text: str) -> list[str]:
    """The names of all generated pieces of a page, in its order."""
    return [found["name"] for found in MARKED.finditer(text)]


def fill(text: str, read: Read, where: str) -> str:
    """A page with every generated piece written again."""

    def written(found: re.Match[str]) -> str:
        name, body = found["name"], found["body"]
        if name not in TEXTS:
            raise ValueError(
                f"{where}: nothing generates {name!r}; add it to one of the doc_*.py, such as doc_speed.py"
            )
        made = TEXTS[name](read)
        if not body.startswith("\n"):
            return f"<!-- generated: {name} -->{made}<!-- end -->"
        return f"<!-- generated: {name} -->\n\n{_as_block(made)}\n\n<!-- end -->"

    if text.count(OPENING) != len(names_in(text)):
        raise ValueError(f"{where}: a generated piece has no name or no end; write <!-- end --> after it")
    return MARKED.sub(written, text)


def _as_block(text: str) -> str:
    """Tables as they are, sentences with a full stop and in lines of a page's width."""
    if text.startswith("|"):
        return text
    # A number and its percent sign stay on one line.
    text = (text if text.endswith(".") else f"{text}.").replace(" %", "\0%")
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0%", " %")


def update(root: Path, check: bool) -> list[str]:
    """Write the pages and figures of a checkout again, or only look; the names of those that change."""
    read = reader(root)
    made = {page: fill(page.read_text(), read, str(page.relative_to(root))) for page in pages(root)}
    changed = []
    for path, text in {**made, **doc_evidence.drawn(root)}.items():
        if not path.is_file() or path.read_text() != text:
            changed.append(str(path.relative_to(root)))
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    return changed


def main() -> int:
    """Exit code 1 with `--check` if a page does not say what results/ holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if a page would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout than this one")
    arguments = parser.parse_args()
    try:
        changed = update(arguments.root, arguments.check)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for name in changed:
        print(f"{name}: {'differs from results/' if arguments.check else 'written'}")
    return 1 if arguments.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
