"""The architecture as one picture, docs/images/architecture.svg: rooms of the package and their imports, from the code.

A room stands below every room that imports it. An arrow is an import that no longer path of arrows already implies.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

WIDTH, ROW, BOX, WIDE, GAP = 900, 88, 46, 190, 26
ABOUT = {
    "cli": "commands",
    "report": "HTML pages",
    "bench": "throughput and memory",
    "compare": "arms over seeds, verdicts",
    "train": "loop, checkpoints, guard",
    "export": "ONNX, torch.export, timm",
    "evaluate": "load, evaluate, predict",
    "probes": "signal, verdict, cost",
    "surgery": "swap, fold, accelerate",
    "timm_models": "in timm's registry",
    "data": "read, decode, augment",
    "drawing": "charts as SVG and PNG",
    "models": "config, ViT, weights",
    "parts": "norms, residuals, stems, …",
    "ops": "kernels and references",
}


# Rooms that nearly all others import: drawn as the ground on which they stand.
GROUND = {"files", "machine", "names"}
# Columns from 0 to 3, so that few arrows cross; rooms without one are centred in their row.
COLUMNS = {
    "report": 0.0,
    "compare": 1.0,
    "bench": 2.0,
    "export": 3.0,
    "surgery": 0.5,
    "probes": 1.5,
    "data": 2.5,
    "drawing": 0.5,
    "models": 1.5,
}


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
            for name in names:
                words = name.split(".")
                if words[0] == "fathoms" and len(words) > 1 and words[1] != room:
                    found.setdefault(room, set()).add(words[1])
    return found


def reduced(edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """The edges without those that a longer path implies."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        rest = list(edges.get(start, ()))
        while rest:
            room = rest.pop()
            if room not in seen:
                seen.add(room)
                rest += edges.get(room, ())
        return seen

    return {
        room: {to for to in targets if not any(to in reach(other) for other in targets - {to})}
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


def drawing(root: Path) -> str:
    """The picture as SVG; single files beside the rooms are drawn as one foundation."""
    package = root / "src" / "fathoms"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")} - GROUND
    files = sorted(path.stem for path in package.glob("*.py") if not path.stem.startswith("__"))
    edges = {room: targets & rooms for room, targets in imports(root).items() if room in rooms}
    rows = levels(edges, rooms)
    boxes = _boxes(rows)
    arrows = sorted((room, to) for room, targets in reduced(edges).items() for to in targets)
    parts = [_arrow(boxes[room], boxes[to]) for room, to in arrows]
    parts += [_box(name, boxes[name]) for name in sorted(rooms)]
    foot = (max(rows.values()) + 1) * ROW + 8
    parts.append(_foundation(sorted(GROUND), files, foot))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {foot + 66}" role="img" '
        'font-family="system-ui, sans-serif"><title>Rooms of fathoms and what they import</title>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#7a8794"/></marker></defs>'
    )
    return (
        "\n".join([head, f'<rect width="{WIDTH}" height="{foot + 66}" fill="#fff"/>', *parts, "</svg>"])
        + "\n"
    )


def _boxes(rows: dict[str, int]) -> dict[str, tuple[float, float]]:
    """Left and top of each box, each row centred."""
    placed = {}
    for level in sorted(set(rows.values())):
        row = sorted(name for name, own in rows.items() if own == level)
        middle = [(3 - len(row) + 1) / 2 + place for place in range(len(row))]
        columns = [COLUMNS.get(name, -1) for name in row]
        for name, column in zip(row, middle if -1 in columns else columns, strict=True):
            placed[name] = ((WIDTH - 4 * WIDE - 3 * GAP) / 2 + column * (WIDE + GAP), 12.0 + level * ROW)
    return placed


def _box(name: str, place: tuple[float, float]) -> str:
    left, top = place
    middle = left + WIDE / 2
    return (
        f'<g><rect x="{left:.0f}" y="{top:.0f}" width="{WIDE}" height="{BOX}" rx="7" fill="#eef4fb" stroke="#2a6cb0"/>'
        f'<text x="{middle:.0f}" y="{top + 20:.0f}" text-anchor="middle" font-size="15" font-weight="600" '
        f'fill="#17324d">{escape(name)}</text><text x="{middle:.0f}" y="{top + 37:.0f}" text-anchor="middle" '
        f'font-size="12" fill="#44576a">{escape(ABOUT.get(name, ""))}</text></g>'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """A curve from the lower edge of a box to the upper edge of another, ends shifted towards each other.

    One that passes by a row stays outside of its boxes as long as it can, and arrives near the corner.
    """
    far = end[1] - start[1] > ROW
    shift = max(-60.0, min(60.0, (end[0] - start[0]) / 4))
    x0, y0 = start[0] + WIDE / 2 + shift, start[1] + BOX
    x1, y1 = end[0] + WIDE / 2 - (shift * 1.4 if far else shift), end[1] - 1
    first, second = (y0 + 0.95 * (y1 - y0), y1 - 30) if far else ((y0 + y1) / 2, (y0 + y1) / 2)
    return (
        f'<path d="M{x0:.0f} {y0:.0f} C{x0:.0f} {first:.0f} {x1:.0f} {second:.0f} {x1:.0f} {y1:.0f}" '
        'fill="none" stroke="#7a8794" stroke-width="1.4" marker-end="url(#tip)"/>'
    )


def _foundation(ground: list[str], files: list[str], top: float) -> str:
    lines = [
        ("15", "600", ", ".join(ground)),
        ("12", "400", f"which nearly all rooms use; beside them {', '.join(files)}"),
    ]
    texts = "".join(
        f'<text x="{WIDTH / 2}" y="{top + 23 + 19 * index}" text-anchor="middle" font-size="{size}" '
        f'font-weight="{weight}" fill="#44576a">{escape(line)}</text>'
        for index, (size, weight, line) in enumerate(lines)
    )
    box = f'<rect x="60" y="{top}" width="{WIDTH - 120}" height="54" rx="7" fill="#f5f5f2" stroke="#a9a99f"/>'
    return f"<g>{box}{texts}</g>"


def pages(root: Path) -> dict[str, str]:
    """The picture, by its file name under docs/."""
    return {"images/architecture.svg": drawing(root)}
