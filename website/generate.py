"""Write the generated pages of docs/ from the registries, the parsers, the imports and results/.

python website/generate.py            # write them
python website/generate.py --check    # change nothing, exit 1 if one would change
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import api_pages  # noqa: E402
import architecture  # noqa: E402
import coming_from  # noqa: E402
import command_pages  # noqa: E402
import family_pages  # noqa: E402
import recipe_page  # noqa: E402
from doc_format import reader  # noqa: E402

OWNED = ("families", "commands", "api")
"""Folders of docs/ that hold generated pages alone."""


def made(root: Path) -> dict[str, str]:
    """Every generated file of docs/, and its text."""
    return {
        **api_pages.pages(),
        **family_pages.pages(reader(root)),
        **command_pages.pages(),
        **recipe_page.pages(),
        **coming_from.pages(root),
        **architecture.pages(root),
    }


def stale(docs: Path, texts: dict[str, str]) -> list[str]:
    """Files whose text differs, and pages in generated folders that nothing writes any more."""
    changed = [
        name
        for name, text in texts.items()
        if not (docs / name).is_file() or (docs / name).read_text() != text
    ]
    left = [str(path.relative_to(docs)) for folder in OWNED for path in (docs / folder).glob("*.md")]
    return sorted([*changed, *(set(left) - set(texts))])


def main() -> int:
    """Exit code 1 with `--check` if a page does not say what its source says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if a page would change")
    check = parser.parse_args().check
    texts = made(ROOT)
    names = stale(ROOT / "docs", texts)
    for name in names:
        path = ROOT / "docs" / name
        if not check and name in texts:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(texts[name])
        elif not check:
            path.unlink()
        print(
            f"docs/{name}: {'differs from its source' if check else 'written' if name in texts else 'removed'}"
        )
    return 1 if check and names else 0


if __name__ == "__main__":
    sys.exit(main())
