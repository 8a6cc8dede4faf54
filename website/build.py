"""Build the documentation site, strictly: `python website/build.py`, or `make docs`.

Pages are gathered into build/site/pages, built by Zensical into build/site/html, and every link inside of the result
is followed. A warning, a dead link or a page that the navigation leaves out is an error.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

from links import dead_links
from stage import DeadLinkError, stage

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"<code>(?=[^<\n]{1,26}</code>)")
"""Code in a sentence, short enough for one line of a phone: a browser would break it behind the hyphens of a flag."""


def in_navigation(entries: Any) -> set[str]:
    """The pages that a navigation names, however deep."""
    if isinstance(entries, str):
        return {entries}
    values = entries.values() if isinstance(entries, dict) else entries
    return set().union(*map(in_navigation, values))


def configured(root: Path, url: str = "") -> str:
    """The settings of the site, with this checkout's paths.

    Only with a `url` does the site name an address of its own, in canonical links and the site map.
    """
    filled = {
        "SOURCE": str(root / "src"),
        "THEME": str(root / "website" / "theme"),
        "EXTENSION": str(root / "website" / "docstring_markdown.py"),
    }
    text = (root / "website" / "zensical.toml").read_text()
    for word, value in filled.items():
        head, found, rest = text.partition("[project]")
        text = head + found + rest.replace(word, value)
    return text.replace("[project]", f'[project]\nsite_url = "{url}"', 1) if url else text


def for_programs(entries: Any, pages: Path) -> str:
    """llms.txt: every page of the navigation with its first sentence."""
    if isinstance(entries, list):
        return "".join(for_programs(each, pages) for each in entries)
    lines = ""
    for title, place in entries.items():
        if isinstance(place, list):
            lines += f"\n## {title}\n\n{for_programs(place, pages)}"
        else:
            paragraphs = (pages / place).read_text().split("\n\n")
            about = next(each for each in paragraphs if not each.startswith(("#", "<", "|", "!", "```")))
            sentence = re.split(r"(?<=[.?])\s", " ".join(about.split()))[0].strip("*")
            lines += f"- [{title}]({place.removesuffix('index.md').removesuffix('.md') or '.'}): {sentence}\n"
    return lines


def build(root: Path, target: Path, url: str = "") -> list[str]:
    """Stage and build the site; what is wrong with it, a line each."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    pages = stage(root, target / "pages")
    config = configured(root, url)
    named = in_navigation(tomllib.loads(config)["project"]["nav"])
    # Records of measurements and the READMEs of rooms are linked from the sentences that use them.
    guides = {page for page in pages if not page.startswith(("results/", "source/"))}
    wrong = [f"website/zensical.toml: the navigation leaves out {page}" for page in sorted(guides - named)]
    wrong += [f"website/zensical.toml: there is no page {page}" for page in sorted(named - set(pages))]
    (target / "zensical.toml").write_text(config)
    command = [str(Path(sysconfig.get_path("scripts")) / "zensical"), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=target, capture_output=True, text=True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    if done.returncode or "warning" in said.lower():
        wrong.append(f"zensical build: exit {done.returncode}\n{said}")
    nav = tomllib.loads(config)["project"]["nav"]
    (target / "html" / "llms.txt").write_text(f"# fathoms\n{for_programs(nav, target / 'pages')}")
    for page in (target / "html").rglob("*.html"):
        page.write_text(CODE.sub('<code class="short">', page.read_text()))
    return [*wrong, *dead_links(target / "html")]


def main() -> int:
    """Exit code 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", type=Path, default=ROOT / "build" / "site", help="folder of the result")
    parser.add_argument("--url", default="", help="address at which the site will be published")
    args = parser.parse_args()
    target = args.target.resolve()
    try:
        wrong = build(ROOT, target, args.url)
    except DeadLinkError as error:
        wrong = [str(error)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    pages = sum(1 for _ in (target / "html").rglob("*.html"))
    # Search and folder addresses need a server; files opened from the disk have neither.
    folder = shlex.quote(str(target / "html"))
    print(f"{pages} pages; to read them: python -m http.server --directory {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
