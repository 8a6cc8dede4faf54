"""Families of named parts: a choice is a name, and an unknown name is an error."""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from fathoms.errors import ConfigError, FathomsError, UnknownNameError

T = TypeVar("T")
# No name is longer; a file's megabyte is not compared with every option.
_LONGEST = 80
Entry = TypeVar("Entry", bound=Callable[..., Any])


def nearest(name: str, options: Iterable[str]) -> str:
    """The option closest to `name`: the same but for case, one that begins with it, or the most alike."""
    options, name = list(options), name[:_LONGEST]
    same = [option for option in options if option.lower() == name.lower()]
    longer = [option for option in options if name and option.lower().startswith(name.lower())]
    return (same or longer or difflib.get_close_matches(name.lower(), options, n=1, cutoff=0.0) or [""])[0]


def check_name(name: str, options: Iterable[str], kind: str, where: str = "") -> str:
    """Return `name` if it is one of `options`; else say which one is nearest."""
    options = list(options)
    if isinstance(name, str) and name in options:
        return name
    place = f"{where}: " if where else ""
    # Not a text: a table or a list out of a file, which is told by its kind.
    shown = repr(name[:_LONGEST]) if isinstance(name, str) else reprlib.repr(name)
    hint = nearest(name if isinstance(name, str) else "", options)
    raise UnknownNameError(f"{place}no {kind} is called {shown}; did you mean {hint!r}?")


class Registry(Generic[T]):
    """One family of parts: `add` a class under a name, look it up, build it.

    >>> SHAPES = Registry("shape")
    >>> @SHAPES.add("square")
    ... def square(side: float) -> float:
    ...     return side * side
    >>> SHAPES.build("square", 3)
    9
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Callable[..., T]] = {}
        self._about: dict[str, Any] = {}
        self._summaries: dict[str, str] = {}

    def add(self, name: str, about: Any = None, summary: str = "") -> Callable[[Entry], Entry]:
        """Register the decorated class.

        Args:
            name: What users write to pick it.
            about: What a builder must know beyond the class itself.
            summary: One line for listings, where the first line of the docstring will not do.
        """

        def register(entry: Entry) -> Entry:
            if name in self._entries:
                raise FathomsError(f"{self.kind} {name!r} is registered already; choose another name")
            self._entries[name] = entry
            self._about[name] = about
            self._summaries[name] = summary or (inspect.getdoc(entry) or "").partition("\n")[0]
            return entry

        return register

    def __getitem__(self, name: str) -> Callable[..., T]:
        return self._entries[check_name(name, self._entries, self.kind)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def check(self, name: str, where: str = "") -> str:
        """Return `name`, or raise with the nearest valid name; `where` names the field."""
        return check_name(name, self._entries, self.kind, where)

    def about(self, name: str) -> Any:
        """What was said of the part when it was registered, or None."""
        return self._about[self.check(name)]

    def summary(self, name: str) -> str:
        """One line on what the part does."""
        return self._summaries[self.check(name)]

    def build(self, name: str, *args: Any, **options: Any) -> T:
        """Build the part; an option of `None` means its own default, an unused one is refused."""
        entry = self[name]
        given = {key: value for key, value in options.items() if value is not None}
        for key in given.keys() - set(inspect.signature(entry).parameters):
            raise ConfigError(f"{self.kind} {name!r} takes no {key}; leave it out")
        return entry(*args, **given)
