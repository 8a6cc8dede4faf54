"""Registries: families of parts picked by name; an unknown name is an error that offers the nearest."""

from __future__ import annotations

import difflib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast, overload

from fathoms.errors import ConfigError, FathomsError, UnknownNameError
from fathoms.names.foreign_names import meant_by

T = TypeVar("T")
M = TypeVar("M")
# No name is longer; a megabyte out of a file is not compared with every option.
_LONGEST = 80
_SHORT = 4
_LISTED = 8
Entry = TypeVar("Entry", bound=Callable[..., Any])


def nearest(name: str, options: Iterable[str]) -> str:
    """The option closest to `name`; "" if none is close.

    The same but for case, the one that other libraries call so, one that begins with it, or the most alike.

    >>> nearest("cosin", ["step", "cosine"]), nearest("banana", ["step", "cosine"])
    ('cosine', '')
    """
    options, name = list(options), name[:_LONGEST]
    same = [option for option in options if option.lower() == name.lower()]
    brought = [found] if (found := meant_by(name, options)) else []
    longer = [option for option in options if name and option.lower().startswith(name.lower())]
    # Of a short name few letters are right when one is wrong.
    cutoff = 0.4 if len(name) <= _SHORT else 0.55
    alike = difflib.get_close_matches(name.lower(), options, n=1, cutoff=cutoff)
    return next(iter(same or brought or longer or alike), "")


def hint(name: str, options: Iterable[str]) -> str:
    """Advice for a name that is not among the options: the nearest one, or all of a few, or how to list them.

    >>> hint("cosin", ["step", "cosine"]), hint("banana", ["step", "cosine"])
    ("did you mean 'cosine'?", "use 'step' or 'cosine'")
    """
    options = list(options)
    near = nearest(name, options)
    if near:
        return f"did you mean {near!r}?"
    shown = [repr(option) for option in options[:_LISTED]]
    if len(options) > _LISTED:
        return f"use one such as {', '.join(shown[: _LISTED // 2])}"
    return f"use {', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else f"use {''.join(shown)}"


def check_name(name: str, options: Iterable[str], kind: str, where: str = "") -> str:
    """Return `name` if it is one of `options`; otherwise raise with the nearest one."""
    options = list(options)
    if isinstance(name, str) and name in options:
        return name
    place = f"{where}: " if where else ""
    # A table or a list out of a file, shortened.
    shown = repr(name[:_LONGEST]) if isinstance(name, str) else reprlib.repr(name)
    advice = hint(name if isinstance(name, str) else "", options)
    raise UnknownNameError(f"{place}no {kind} is called {shown}; {advice}")


class Registry(Generic[T, M]):
    """One family of parts T, each registered under a name with metadata of type M.

    Args:
        kind: The family's name in errors, such as "norm".
        default: The metadata of a part that is registered without any.

    >>> SHAPES: Registry[float, int] = Registry("shape", default=2)
    >>> @SHAPES.add("square")
    ... def square(side: float) -> float:
    ...     return side * side
    >>> SHAPES.build("square", 3), SHAPES.metadata("square")
    (9, 2)
    """

    @overload
    def __init__(self: Registry[Any, None], kind: str) -> None: ...
    @overload
    def __init__(self, kind: str, default: M) -> None: ...
    def __init__(self, kind: str, default: Any = None) -> None:
        self.kind = kind
        self._default = cast(M, default)
        self._entries: dict[str, Callable[..., T]] = {}
        self._metadata: dict[str, M] = {}
        self._summaries: dict[str, str] = {}

    def add(self, name: str, metadata: M | None = None, summary: str = "") -> Callable[[Entry], Entry]:
        """Register the decorated class or function.

        Args:
            name: The name users write.
            metadata: What a builder must know besides the class; the family's default if not given.
            summary: One line for listings; the first line of the docstring if not given.
        """

        def register(entry: Entry) -> Entry:
            if name in self._entries:
                raise FathomsError(f"{self.kind} {name!r} is registered already; choose another name")
            self._entries[name] = entry
            self._metadata[name] = self._default if metadata is None else metadata
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

    def metadata(self, name: str) -> M:
        """The metadata the part was registered with, or the family's default."""
        return self._metadata[self.check(name)]

    def summary(self, name: str) -> str:
        """One line on the part, for listings."""
        return self._summaries[self.check(name)]

    def build(self, name: str, *args: Any, **options: Any) -> T:
        """Build the part; an option of `None` keeps the part's own default, one that it does not take is refused."""
        entry = self[name]
        given = {key: value for key, value in options.items() if value is not None}
        for key in given:
            if not self.takes(name, key):
                raise ConfigError(f"{self.kind} {name!r} takes no {key}; leave it out")
        return entry(*args, **given)

    def takes(self, name: str, option: str) -> bool:
        """Whether the part is built with an option of this name."""
        parameters = inspect.signature(self[name]).parameters
        return option in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
