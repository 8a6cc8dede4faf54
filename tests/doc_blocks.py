"""Code blocks of the Markdown pages: what they hold, what they print, and which are not run, with the reason.

Blocks marked `python`, `bash` or `sh` are run; without a language, those that begin with a command. A block marked
`output` right after one of them is what it printed. A block that cannot run on a CPU without network has a comment on
the line above it: `<!-- not run: needs a GPU -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SHELL = ("bash", "sh")
PROGRAMS = ("fathoms", "python", "pytest", "make", "pip", "torchrun")
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>[\w-]*)")
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->")
_NUMBER = re.compile(r"[-+−]?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
# Clocks and machines, digests, dates, forecasts.
_VARIES = re.compile(
    r"\b\d[\d,.:]*(?= ?(?:s|ms|seconds?|minutes?|min|hours?|images/s|[MGk]i?B|threads?|cores?)\b)"
    r"|\b[0-9a-f]{6,}\b|\b\d{4}-\d\d-\d\d\b|\d+ to \d+(?= more seeds)"
)
_PROGRESS = re.compile(r"^\s*\d+ ?% .* left\b|^\[\d+/\d+\]|^  so far: |Warning: |^  warnings\.warn")
"""Lines that come by the clock, and warnings of other libraries."""
_BEGIN = re.compile(r"\s*\S*(?: \S+)?")
_ROOM = re.compile(r"(?:/[\w.+-]+)+/(?=site-packages/|stage/)")
"""The place of an installation, or of the folder in which a page runs."""


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Args:
        page: The file.
        line: Its first line of code, counted from 1.
        kind: "python", "shell", "output" or "text".
        code: The code.
        not_run: The reason given above it, or "".
        printed: The block after it of what it prints, if there is one.
    """

    page: Path
    line: int
    kind: str
    code: str
    not_run: str = ""
    printed: Block | None = None

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, one on each line; a line that ends in a backslash goes on."""
        lines = re.sub(r"\\\n\s*", " ", self.code).splitlines()
        plain = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
        return [line for line in plain if line]


def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a page, in order; what a block prints is part of it."""
    found: list[Block] = []
    opened: tuple[str, str, int, str] | None = None
    code: list[str] = []
    reason = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            marks, language, start, why = opened
            if fence and fence["marks"].startswith(marks) and not fence["language"]:
                text = "".join(f"{each}\n" for each in code)
                block = Block(page, start, _kind(language, text), text, why)
                if block.kind == "output" and found:
                    before = found.pop()
                    found.append(
                        Block(before.page, before.line, before.kind, before.code, before.not_run, block)
                    )
                else:
                    found.append(block)
                opened, code = None, []
            else:
                code.append(line)
        elif fence:
            opened, reason = (fence["marks"], fence["language"], number + 1, reason), ""
        elif line.strip():
            comment = _NOT_RUN.search(line)
            reason = comment[1] if comment else ""
    return found


def _kind(language: str, code: str) -> str:
    if language in SHELL:
        return "shell"
    if language in ("python", "output"):
        return language
    words = code.split()
    return "shell" if not language and words and words[0] in PROGRAMS else "text"


def told(printed: str, shape: str = "") -> list[str]:
    """The lines of an output, without those that come by the clock.

    A line "..." of the shape leaves lines out: as many of the first lines are kept as the shape has before the first
    "...", between two of them the lines that begin with the same two words, and after the last "..." all lines from the
    one on that begins as the first there does. A line that goes on indented is one line.
    """
    lines = [_ROOM.sub("…/", line.rstrip()) for line in printed.splitlines() if not _PROGRESS.match(line)]
    whole = re.findall(r"^.*(?:\n    .*)*", "\n".join(lines).strip("\n"), re.MULTILINE)
    parts = [
        re.findall(r"^.+(?:\n    .*)*|^$", part, re.MULTILINE)
        for part in re.split(r"^\.\.\.\n", shape, flags=re.MULTILINE)
    ]
    if len(parts) > 1:
        first, *middle, last = ([_BEGIN.match(each)[0] for each in part if each] for part in parts)
        kept = whole[: len(first)]
        for begins in middle:
            kept += ["...", *(line for line in whole if line.startswith(tuple(begins)))]
        found = [at for at, line in enumerate(whole) if last and line.startswith(last[0])]
        whole = [*kept, "...", *whole[found[-1] if found else len(whole) - len(last) :]]
    return "\n".join(whole).splitlines()


def differing(shown: list[str], printed: list[str]) -> list[str]:
    """The lines of an output that are not those that a page shows: other words, or other numbers than may vary.

    Times, rates, memory, digests, dates and forecasts of seeds are not compared. A whole number may vary by a tenth;
    one with a decimal point was measured, and may vary by 5 or by three tenths from machine to machine.
    """
    wrong = [f"- {old}\n+ {new}" for old, new in zip(shown, printed, strict=False) if not _equal(old, new)]
    longer, sign = (shown, "-") if len(shown) > len(printed) else (printed, "+")
    return wrong + [f"{sign} {line}" for line in longer[min(len(shown), len(printed)) :]]


def _equal(shown: str, printed: str) -> bool:
    old, new = (
        re.sub(r"(?:[\s─━═|]|--+)+", " ", _VARIES.sub("#", line)).strip() for line in (shown, printed)
    )
    if _NUMBER.sub("0", old) != _NUMBER.sub("0", new):
        return False
    return all(map(_near, _NUMBER.findall(old), _NUMBER.findall(new)))


def _near(shown: str, printed: str) -> bool:
    a, b = (float(each.replace(",", "").replace("−", "-")) for each in (shown, printed))
    measured = re.search(r"[.e]", shown + printed)
    return abs(a - b) <= max(*((0.3 * abs(a), 0.3 * abs(b), 5) if measured else (0.1 * abs(a), 0.1 * abs(b))))
