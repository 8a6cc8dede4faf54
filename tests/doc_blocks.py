"""Code blocks of the Markdown pages: what they hold, and which of them are not run, with the reason.

Blocks marked `python`, `bash`, `sh` or `console` are run; without a language, those that begin with a command.
A block that cannot run on a CPU without network has a comment on the line above it: `<!-- not run: needs a GPU -->`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

SHELL = ("bash", "sh", "shell", "console")
PROGRAMS = ("fathoms", "python", "pytest", "make", "pip", "torchrun")
_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,}|~{3,})(?P<language>[\w-]*)")
_NOT_RUN = re.compile(r"<!--\s*not run:\s*(.+?)\s*-->")
_NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Command:
    """A command of a shell block, and the lines that a console block promises it prints."""

    text: str
    promised: tuple[str, ...] = ()


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Args:
        page: The file.
        line: Its first line of code, counted from 1.
        kind: "python", "shell" or "text".
        code: The code.
        not_run: The reason given above it, or "".
        console: Whether lines that begin with "$ " are commands and all others their output.
    """

    page: Path
    line: int
    kind: str
    code: str
    not_run: str = ""
    console: bool = field(default=False)

    @property
    def commands(self) -> list[Command]:
        """The commands of a shell block, one on each line; a line that ends in a backslash goes on."""
        lines = re.sub(r"\\\n\s*", " ", self.code).splitlines()
        if not self.console:
            plain = (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines)
            return [Command(line) for line in plain if line]
        found: list[Command] = []
        for line in lines:
            if line.startswith("$ "):
                found.append(Command(re.sub(r"\s#.*", "", line[2:]).strip()))
            elif found and line.strip():
                found[-1] = Command(found[-1].text, (*found[-1].promised, line.rstrip()))
        return found


def blocks_of(page: Path) -> list[Block]:
    """The code blocks of a page, in order."""
    found: list[Block] = []
    opened: tuple[str, str, int, str] | None = None
    code: list[str] = []
    reason = ""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is not None:
            marks, language, start, why = opened
            if fence and fence["marks"].startswith(marks) and not fence["language"]:
                text = "\n".join(code) + "\n"
                found.append(Block(page, start, _kind(language, text), text, why, _is_console(text)))
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
    if language in ("python", "py"):
        return "python"
    words = code.removeprefix("$ ").split()
    return "shell" if not language and words and words[0] in PROGRAMS else "text"


def _is_console(code: str) -> bool:
    return code.startswith("$ ")


def broken_promises(promised: tuple[str, ...], printed: str, tolerance: float = 0.05) -> list[str]:
    """The promised lines that were not printed, in this order, with numbers within a relative tolerance.

    A line of "..." or "…" stands for any lines, and at the end of a line for its rest.
    """
    lines, missing = [_plain(line) for line in printed.splitlines()], []
    for line in promised:
        wanted = _plain(line)
        if wanted in ("", "...", "…"):
            continue
        at = next((i for i, have in enumerate(lines) if _equal(wanted, have, tolerance)), None)
        if at is None:
            missing.append(line)
        else:
            lines = lines[at + 1 :]
    return missing


def _plain(line: str) -> str:
    return " ".join(line.split())


def _equal(wanted: str, have: str, tolerance: float) -> bool:
    """Whether two lines have the same words, and numbers within the tolerance."""
    for end in ("...", "…"):
        if wanted.endswith(end):
            words = len(_NUMBER.sub("0", wanted.removesuffix(end)).rstrip())
            shared = wanted.removesuffix(end).rstrip()
            return _NUMBER.sub("0", have)[:words] == _NUMBER.sub("0", shared) and _near(
                shared, have, tolerance
            )
    return _NUMBER.sub("0", wanted) == _NUMBER.sub("0", have) and _near(wanted, have, tolerance)


def _near(wanted: str, have: str, tolerance: float) -> bool:
    pairs = zip(_NUMBER.findall(wanted), _NUMBER.findall(have), strict=False)
    values = [(float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in pairs]
    return all(abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in values)
