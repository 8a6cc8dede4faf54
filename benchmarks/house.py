"""Size and shape of the code: `python benchmarks/house.py --against REV` prints a table, a column a commit.

It counts files, lines and imports of src, tests and benchmarks, files with one importer, base names that repeat, import
cycles, and the files of the package that a small training enters, as `sys.setprofile` sees them.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACER = """
import contextlib, io, json, sys, threading
source, folder = sys.argv[1:]
entered, stages, updates = set(), {}, []
def note(frame, event, _):
    name = frame.f_code.co_filename
    # Functions alone (CO_OPTIMIZED): not the bodies of modules and classes, which an import runs.
    if event == "call" and frame.f_code.co_flags & 1 and name.startswith(source):
        if frame.f_code.co_name == "write_report":
            stage("saving and the end of a run")
        entered.add(name[len(source):])
def stage(name):
    stages.setdefault(name, sorted(entered))
    entered.clear()
def before(model, *_):
    if type(model).__name__ == "ViT" and model.training and not updates:
        stage("to the first batch")
def after(*_):
    updates.append(1)
    stage(f"update {len(updates)}")
threading.setprofile(note)
sys.setprofile(note)
from fathoms.cli.main import main
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
register_module_forward_pre_hook(before)
register_optimizer_step_post_hook(after)
small = "--recipe digits --depth 2 --dim 32 --heads 2 --epochs 1 --warmup-epochs 0 --experiment a --output"
with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
    code = main(["train", *small.split(), folder])
    stage("the end of the command")
    code = code or main(["report", folder + "/a"])
    stage("the page of a run")
sys.setprofile(None)
threading.setprofile(None)
if code:
    sys.exit(said.getvalue())
# From the optimizer step of the third update to that of the fourth: all that an update enters.
stages["an update, in train/"] = [name for name in stages["update 4"] if name.startswith("training/")]
wanted = "to the first batch", "an update, in train/", "saving and the end of a run", "the page of a run"
print(json.dumps({name: len(stages[name]) for name in wanted}))
"""


def package_files(root: Path, room: str) -> list[Path]:
    """Every Python file of a room, but caches."""
    return sorted(path for path in (root / room).rglob("*.py") if "__pycache__" not in path.parts)


def counts(root: Path, room: str) -> dict[str, float]:
    """Files, lines and lines a file."""
    sizes = [len(path.read_text().splitlines()) for path in package_files(root, room)]
    return {
        "files": len(sizes),
        "lines": sum(sizes),
        "mean": round(statistics.mean(sizes)),
        "median": round(statistics.median(sizes)),
    }


def imports_of(path: Path, source: Path) -> tuple[int, set[str]]:
    """Lines of import statements, and the modules of the package that they name."""
    tree, lines, named = ast.parse(path.read_text()), 0, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines += (node.end_lineno or node.lineno) - node.lineno + 1
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fathoms"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                place = source / (inner.replace(".", "/") + ".py")
                named.add(
                    inner
                    if place.is_file() or (place.with_suffix("") / "__init__.py").is_file()
                    else node.module
                )
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names if alias.name.startswith("fathoms")}
    return lines, named


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected modules, the largest first (Tarjan)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in graph[module]:
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            at = stack.index(module)
            found.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for module in graph:
        if module not in order:
            visit(module)
    return sorted((group for group in found if len(group) > 1), key=len, reverse=True)


def shape(root: Path) -> dict[str, object]:
    """Everything that is counted without running the code."""
    source = root / "src"
    files = package_files(root, "src")
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in files
    }
    read = {name: imports_of(path, source) for name, path in modules.items()}
    graph = {
        name: {other for other in named if other in modules and other != name}
        for name, (_, named) in read.items()
    }
    importers = collections.Counter(other for others in graph.values() for other in others)
    names = collections.Counter(path.stem for path in files if path.stem != "__init__")
    rooms = {room: counts(root, room) for room in ("src", "tests", "benchmarks")}
    return {
        **{f"{room}: {key}": value for room, found in rooms.items() for key, value in found.items()},
        "src: import lines, %": round(
            100 * sum(lines for lines, _ in read.values()) / rooms["src"]["lines"], 1
        ),
        "src: files with one importer": sum(importers[name] == 1 for name in modules),
        "src: base names that repeat": sum(count > 1 for count in names.values()),
        "src: import cycles": len(cycles(graph)),
        "src: files of the largest cycle": max(map(len, cycles(graph)), default=0),
    }


def traced(root: Path) -> dict[str, int]:
    """Files entered on the way to the first batch, by an update (those of train/), to the end, and by a page."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": str(root / "src"),
            "CUDA_VISIBLE_DEVICES": "",
            "NO_COLOR": "1",
        }
        command = [sys.executable, "-c", TRACER, f"{root / 'src' / 'fathoms'}/", folder]
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
    return {f"files: {stage}": count for stage, count in json.loads(done.stdout.splitlines()[-1]).items()}


def at_revision(revision: str) -> dict[str, object]:
    """The same of another commit."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, revision], cwd=ROOT, check=True)
        try:
            return {**shape(tree), **traced(tree)}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main() -> None:
    """Print the table, one row a count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--against", metavar="REV", action="append", default=[], help="another commit, a column of its own"
    )
    arguments = parser.parse_args()
    columns = {
        **{revision: at_revision(revision) for revision in arguments.against},
        "now": {**shape(ROOT), **traced(ROOT)},
    }
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for key in columns["now"]:
        print(f"| {key} | {' | '.join(str(column[key]) for column in columns.values())} |")


if __name__ == "__main__":
    main()
