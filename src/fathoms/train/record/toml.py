"""Write plain values as TOML; the standard library can only read it."""

from __future__ import annotations

from typing import Any


def to_toml(table: dict[str, Any]) -> str:
    """A table as TOML text: plain values first, then sub-tables; None is left out."""
    lines = [f"{key} = {_toml_value(value)}" for key, value in table.items() if _is_plain(value)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{key}]", to_toml(value).rstrip()]
    return "\n".join(lines) + "\n"


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, dict)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(
            character if character.isprintable() and character not in '"\\' else f"\\U{ord(character):08x}"
            for character in value
        )
        return f'"{escaped}"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return repr(value)
