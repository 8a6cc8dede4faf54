"""Write all that docs/ and README generate: whole pages, pictures of results/compare and numbers from results/.

python website/generate.py            # write them
python website/generate.py --check    # change nothing, exit 1 if one would change

Whole pages come from the registries, the parsers and the imports. A number stands between `<!-- generated: NAME -->`
and `<!-- end -->`, in a line or on lines of its own; NAME is a function of numbers_*.py. Tables of docs/surgery.md
marked as written by benchmarks/surgery.py stay with that script.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

import api_pages
import architecture
import coming_from
import command_pages
import family_pages
import numbers_claims  # noqa: F401  # their texts register themselves
import numbers_compare  # noqa: F401
import numbers_evidence
import numbers_speed  # noqa: F401
import recipe_page
from doc_format import TEXTS, Read, reader

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->(?P<body>.*?)<!-- end -->", re.DOTALL)


def made(root: Path) -> dict[Path, str]:
    """Every generated file and its text."""
    read = reader(root)
    pages = {
        **api_pages.pages(),
        **family_pages.pages(read),
        **command_pages.pages(),
        **recipe_page.pages(),
        **coming_from.pages(ROOT),
        **architecture.pages(ROOT),
    }
    whole = {root / "docs" / name: text for name, text in pages.items()}
    filled = {
        page: fill(page.read_text(), read, str(page.relative_to(root)))
        for page in written_by_hand(root)
        if page not in whole
    }
    return {**whole, **filled, **numbers_evidence.drawn(root)}


def written_by_hand(root: Path) -> list[Path]:
    """Pages that may hold generated numbers."""
    return [root / "README.md", root / "RELIABILITY.md", *sorted((root / "docs").glob("*.md"))]


def fill(text: str, read: Read, where: str) -> str:
    """A page with every generated piece written again."""

    def written(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in TEXTS:
            raise ValueError(f"{where}: nothing generates {name!r}; add it to one of website/numbers_*.py")
        made = TEXTS[name](read)
        own_lines = found["body"].startswith("\n")
        return f"<!-- generated: {name} -->{_as_block(made) if own_lines else made}<!-- end -->"

    if text.count("<!-- generated:") != len(MARKED.findall(text)):
        raise ValueError(f"{where}: a generated piece has no name or no end; write <!-- end --> after it")
    return MARKED.sub(written, text)


def _as_block(text: str) -> str:
    """Tables as they are, sentences with a full stop and in lines of a page's width."""
    if not text.startswith("|"):
        # A number and its percent sign stay on one line.
        text = (text if text.endswith(".") else f"{text}.").replace(" %", "\0%")
        text = textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False).replace("\0%", " %")
    return f"\n\n{text}\n\n"


def stale(texts: dict[Path, str]) -> list[Path]:
    """Files whose text differs."""
    return sorted(path for path, text in texts.items() if not path.is_file() or path.read_text() != text)


def main() -> int:
    """Exit code 1 with `--check` if a page does not say what its source says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if a page would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout than this one")
    arguments = parser.parse_args()
    try:
        texts = made(arguments.root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    found = stale(texts)
    for path in found:
        print(f"{path.relative_to(arguments.root)}: ", end="")
        if arguments.check:
            print("differs from its source")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[path])
            print("written")
    return 1 if arguments.check and found else 0


if __name__ == "__main__":
    sys.exit(main())
