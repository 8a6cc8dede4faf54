"""Dead links and anchors of a built site, which the site generator does not report."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Links(HTMLParser):
    """The ids of one page, and what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ids, links and sources."""
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.ids.add(value)
            if key == "src" or (key == "href" and tag in ("a", "link")):
                self.targets.append(value or "")


def dead_links(site: Path) -> list[str]:
    """`PAGE: LINK` for every link inside of `site` whose file or anchor is not there."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = found = _Links()
        found.feed(path.read_text())
    dead = []
    for path, page in pages.items():
        # The page for unknown addresses may be served from anywhere.
        if path.name == "404.html":
            continue
        name = path.relative_to(site.resolve())
        dead += [f"{name}: {target}" for target in page.targets if not _is_alive(path, target, pages)]
    return dead


def _is_alive(path: Path, target: str, pages: dict[Path, _Links]) -> bool:
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return True
    goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if goal.is_dir():
        goal = goal / "index.html"
    if not goal.is_file():
        return False
    anchor = unquote(parts.fragment)
    return not anchor or goal not in pages or anchor in pages[goal].ids or anchor.startswith("__")
