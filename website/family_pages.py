"""The page of the switches, docs/switches.md: each value with formula, start, paper, evidence and when to use it.

The text between them, switches.md, is written by hand.
"""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

from doc_format import Read, table
from fathoms.parts import families
from fathoms.parts.residuals import RESIDUALS
from part_evidence import evidence, signal_table
from part_facts import formula, linked, paper, paragraphs, start

ROOT = Path(__file__).parents[1]
FAMILIES = [family for family in families() if family != "mlp_placement"]
"""`mlp_placement` has the values of `attn_placement`."""


def pages(read: Read) -> dict[str, str]:
    """The text of the page, by its file name under docs/."""
    when = tomllib.loads((ROOT / "website" / "when_to_use.toml").read_text())
    text = (ROOT / "website" / "switches.md").read_text()
    made = {"index": _index(), "signal": signal_table(read)}
    for family in FAMILIES:
        made[family] = "\n".join(
            line
            for name in families()[family]
            for line in _part(read, family, name, when.get(family, {}).get(name, "Not known here."))
        ).strip()
    for name, own in made.items():
        head, found, rest = text.partition(f"{{{{ {name} }}}}")
        if not found:
            raise ValueError(f"website/switches.md has no place for {name!r}; write {{{{ {name} }}}} there")
        text = head + own + rest
    return {"switches.md": text}


def _index() -> str:
    rows = []
    for family in FAMILIES:
        own = families()[family]
        shown = "attn_placement`, `mlp_placement" if family == "attn_placement" else family
        names = ", ".join(f"[{name}](#{family}{name})" for name in own)
        rows.append([f"`{shown}`", names])
    return table(["option", "values"], rows)


def _part(read: Read, family: str, name: str, when: str) -> list[str]:
    lines = [f"### {family}={name}", "", linked(formula(family, name)), ""]
    for text in paragraphs(family, name):
        lines += [linked(text), ""]
    rows = [
        ["starts at", start(family, name)],
        ["paper", paper(family, name)],
        ["code", _code(family, name)],
    ]
    if family == "residual" and (why := RESIDUALS.metadata(name).why):
        allowed = ", ".join(f"`{each}`" for each in RESIDUALS.metadata(name).placements)
        rows.append(["allowed with", f"placements {allowed}: {why}"])
    rows += [["evidence here", "<br>".join(evidence(read, family, name))], ["when to use it", when]]
    return [*lines, table(["", ""], rows), ""]


def _code(family: str, name: str) -> str:
    entry = families()[family][name]
    path = inspect.getsourcefile(inspect.unwrap(entry)) or ""
    place = Path(path).resolve().relative_to(ROOT)
    shown = entry.__name__ if inspect.isclass(entry) else place.stem
    return f"[{shown}](../{place})"
