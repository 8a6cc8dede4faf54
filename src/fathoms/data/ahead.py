"""Work that is done in pieces, between the steps of a training loop, and finished when it is needed."""

from __future__ import annotations

from collections.abc import Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """A generator whose result is wanted later: each `next` is a piece of it, its return value the result.

    Args:
        key: what the result is of; one that was begun for something else is no use. None after an error.
        pieces: the work.
    """

    def __init__(self, key: object, pieces: Generator[None, None, T]) -> None:
        self.key = key
        self._pieces = pieces
        self._result: list[T] = []

    def go_on(self) -> bool:
        """Do the next piece; False when nothing is left to do."""
        if self._result:
            return False
        try:
            next(self._pieces)
        except StopIteration as end:
            self._result.append(end.value)
        except BaseException:
            # A generator that raised is over, and would seem to have made None.
            self.key = None
            raise
        return not self._result

    def finish(self) -> T:
        """Do what is left; the result."""
        while self.go_on():
            pass
        return self._result[0]
