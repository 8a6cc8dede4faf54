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

    A line "..." of the shape leaves lines out: as many of the first and last lines are kept as the shape has before the
    first and after the last "...", and between two of them the lines that begin with the same two words.
    """
    lines = [_ROOM.sub("…/", line.rstrip()) for line in printed.splitlines() if not _PROGRESS.match(line)]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    parts = [part.splitlines() for part in re.split(r"^\.\.\.\n", shape, flags=re.MULTILINE)]
    first, last = len(parts[0]), len(parts[-1])
    if len(parts) == 1 or len(lines) <= first + last:
        return lines
    kept = lines[:first]
    for part in parts[1:-1]:
        begins = tuple(_BEGIN.match(line)[0] for line in part)
        kept += ["...", *(line for line in lines if line.startswith(begins))]
    return [*kept, "...", *lines[len(lines) - last :]]


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
