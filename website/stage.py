"""Staging: gather the repository's pages into one folder, as the site generator wants them, with links that fit.

The pages live where they are read in the repository: README.md, docs/, results/ and the READMEs of the source. Their
links are relative there. On the site a page has another place, and a linked file that is not a page is copied to it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

# Pages outside docs/, and where they stand on the site.
ROOT_PAGES = {
    "README.md": "index.md",
    "RELIABILITY.md": "reliability.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?P<open>\]\(|(?:src|href)=\")(?P<target>[^)\s\"]+)(?P<close>\)|\")")
FENCE = re.compile(r"^(```|~~~).*?^\1[^\S\n]*$", re.MULTILINE | re.DOTALL)
OUTSIDE = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|#|/)")


class DeadLinkError(Exception):
    """A link to something that the repository does not hold."""


def places(root: Path) -> dict[str, str]:
    """Every page of the repository, and its place on the site."""
    found = dict(ROOT_PAGES)
    for page in sorted((root / "docs").rglob("*.md")):
        found[str(page.relative_to(root))] = str(page.relative_to(root / "docs"))
    for page in sorted((root / "results").rglob("*.md")):
        name = str(page.relative_to(root))
        # A comparison's own table is linked as a file.
        if page.name != "table.md":
            found[name] = name.replace("README.md", "index.md")
    for page in sorted((root / "src").rglob("README.md")):
        found[str(page.relative_to(root))] = f"source/{page.parent.name}.md"
    return found


def stage(root: Path, target: Path) -> list[str]:
    """Write all pages and the files that they link to into `target`; the names of the pages."""
    pages = places(root)
    shutil.rmtree(target, ignore_errors=True)
    for source, place in pages.items():
        to = target / place
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(rewritten(root, target, source, pages))
    shutil.copytree(root / "website" / "assets", target / "assets")
    return sorted(pages.values())


def rewritten(root: Path, target: Path, source: str, pages: dict[str, str]) -> str:
    """A page's text with its links turned to where their targets stand on the site; code is left as it is."""
    text = (root / source).read_text()
    pieces, last = [], 0

    def turned(found: re.Match[str]) -> str:
        return found["open"] + _turn(root, target, source, found["target"], pages) + found["close"]

    for fence in FENCE.finditer(text):
        pieces += [LINK.sub(turned, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*pieces, LINK.sub(turned, text[last:])])


def _turn(root: Path, target: Path, source: str, link: str, pages: dict[str, str]) -> str:
    """One link of page `source`, as it must be written on the site."""
    if OUTSIDE.match(link):
        return link
    path, hash_mark, anchor = link.partition("#")
    name = os.path.normpath(Path(source).parent / path)
    if (root / name / "README.md").is_file():
        name = f"{name}/README.md"
    here = Path(pages[source]).parent
    if name in pages:
        return os.path.relpath(pages[name], here) + hash_mark + anchor
    if not (root / name).is_file():
        raise DeadLinkError(f"{source}: there is no {link} to link to; name a file of the repository")
    # A browser shows text and downloads what it does not know.
    shown = f"{name}.txt" if name.endswith((".py", ".toml", ".sh")) else name
    copy = target / "files" / shown
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(root / name, copy)
    if name.endswith(".html"):
        _copy_beside(root / name, copy)
    return os.path.relpath(Path("files") / shown, here)


def _copy_beside(page: Path, copy: Path) -> None:
    """Copy the files next to the page of a run that it links to, under the names that it links to."""
    for found in LINK.finditer(page.read_text()):
        name = found["target"].removeprefix("./")
        if found["open"].startswith("href") and "/" not in name and (page.parent / name).is_file():
            shutil.copyfile(page.parent / name, copy.parent / name)
