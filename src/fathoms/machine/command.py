"""The command that is being run: the words given to `fathoms`, for the records of what it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

_words: tuple[str, ...] = ()


def command_words() -> tuple[str, ...]:
    """The words after `fathoms`; none where Python code calls a function of the package instead."""
    return _words


@contextlib.contextmanager
def running(words: Sequence[str]) -> Iterator[None]:
    """Let these be the words until the command has ended."""
    global _words
    before, _words = _words, tuple(words)
    try:
        yield
    finally:
        _words = before
