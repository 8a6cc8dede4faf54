"""The architecture as one picture, docs/images/architecture.svg: rooms of the package and their imports, from the code.

A room stands below every room that imports it. An arrow is an import that no longer path of arrows already implies.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fathoms.plotting.style import BAND, INK, PALETTE, SOFT, new_figure, styled, to_svg

# Beside the column in the middle, so that no arrow runs through a box.
COLUMNS = {"exporting": -1, "data": -1, "surgery": 1, "plotting": -1}


def imports(root: Path) -> dict[str, set[str]]:
    """The rooms that each room imports, also inside of functions."""
    package = root / "src" / "fathoms"
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            words = [name.split(".") for name in names]
            found.setdefault(room, set()).update(w[1] for w in words if w[0] == "fathoms" and len(w) > 1)
    return {room: targets - {room} for room, targets in found.items()}


def reach(edges: dict[str, set[str]], room: str) -> set[str]:
    """Every room that one imports, directly or through others."""
    return set().union(*({to} | reach(edges, to) for to in edges.get(room, ())))


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The edges without those that a longer path implies."""
    return {
        room: {to for to in targets if not any(to in reach(edges, other) for other in targets - {to})}
        for room, targets in edges.items()
    }


def levels(edges: dict[str, set[str]], rooms: set[str]) -> dict[str, int]:
    """The row of each room: one below the lowest room that imports it."""
    found = dict.fromkeys(rooms, 0)
    for _ in rooms:
        for room in rooms:
            for to in edges.get(room, ()):
                found[to] = max(found[to], found[room] + 1)
    return found


@styled
def drawing(root: Path) -> Figure:
    """The rooms in their rows; single files beside them are drawn as one foundation."""
    package = root / "src" / "fathoms"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    files = sorted(path.stem for path in package.glob("*.py") if not path.stem.startswith("__"))
    edges = {room: targets & rooms for room, targets in imports(root).items() if room in rooms}
    rows = levels(edges, rooms)
    places = {name: (COLUMNS.get(name, 0), -row) for name, row in sorted(rows.items())}
    made = new_figure(900, 820, "Rooms of fathoms and their imports")
    axes = made.add_subplot()
    axes.set_axis_off()
    box: dict[str, Any] = {"boxstyle": "round,pad=0.5", "facecolor": "#eef4fb", "edgecolor": PALETTE[0]}
    boxes = {
        name: axes.text(*place, name, ha="center", va="center", weight="bold", color=INK, bbox=box)
        for name, place in places.items()
    }
    for room, targets in sorted(reduced(edges).items()):
        for to in sorted(targets):
            ends = {"patchA": boxes[room].get_bbox_patch(), "patchB": boxes[to].get_bbox_patch()}
            arrow = {"arrowstyle": "-|>", "color": SOFT, "shrinkA": 0, "shrinkB": 2, **ends}
            axes.annotate("", places[to], places[room], arrowprops=arrow)
    foot = -max(rows.values()) - 1
    half = len(files) // 2
    text = (
        f"single files, most of them under all rooms: {', '.join(files[:half])},\n{', '.join(files[half:])}"
    )
    ground = {"boxstyle": "round,pad=0.6", "facecolor": BAND, "edgecolor": SOFT}
    axes.text(0, foot, text, ha="center", va="center", fontsize=9, color=SOFT, bbox=ground)
    axes.set(xlim=(-1.6, 1.6), ylim=(foot - 0.5, 0.5))
    return made


def pages(root: Path) -> dict[str, str]:
    """The picture, by its file name under docs/."""
    return {"images/architecture.svg": to_svg(drawing(root))}
