"""Run the examples, and the code blocks and commands of README and docs, as a reader would.

    python tests/run_examples.py                          # everything; `make examples`
    python tests/run_examples.py docs/probe.md examples/distil.py
    python tests/run_examples.py --shown                  # the blocks whose output a page shows, compared; `make shown`
    python tests/run_examples.py --write docs/start.md    # and written into the page

A block whose output is shown runs as it is, in the order of the page; other long commands run on tiny data
(`doc_stage.py`). What cannot run here is counted and printed with its reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from doc_blocks import Block, blocks_of, differing, told
from doc_stage import PRELUDE, made_small, set_up

ROOT = Path(__file__).parents[1]
EXAMPLE_SECONDS = 120
"""Seconds of a core that an example may take; the wall clock also counts what else the machine does."""
COMMAND_SECONDS = 240
PATIENCE = {"train": 60, "compare": 120}
"""Seconds after which a command that goes on by its nature is interrupted, as a user would; it must end in order."""
INTERRUPTED = (0, 75, 130, 143)

ELSEWHERE = {
    r"^pip |pip install": "tests/fresh_machine.py installs",
    r"^make ": "tests/fresh_machine.py runs it",
    r"^pytest|^python -m pytest": "the test suite",
    r"python (\.\./)?benchmarks/": "a benchmark, whose results are in results/",
    r"^git |^cd ": "tests/fresh_machine.py clones",
    r"--slurm|^#SBATCH|^srun|^sbatch|^if \[|^scontrol": "needs Slurm",
    r"torchrun|--fsdp": "needs several processes on GPUs",
    r"hf-hub:|--push|push_to_hub|timm/\w+\.\w+|hfds/|weights=\"timm/|OWNER/": "needs the Hub",
    r"\bcuda\b": "needs a GPU",
    r"--log ": "needs a tracker",
    r"--against timm": "needs a GPU to take minutes and not hours",
}
"""Commands that are not run here, and why; a block can also say so itself."""


@dataclass(frozen=True)
class Outcome:
    """One thing that was run, or why it was not; what it printed."""

    place: str
    what: str
    status: str
    seconds: float = 0.0
    detail: str = ""


def elsewhere(block: Block) -> str:
    """Why a block is not run here, or ""."""
    # What a comment names is not needed to run Python.
    text = re.sub(r"#.*", "", block.code) if block.kind == "python" else block.code
    found = (why for pattern, why in ELSEWHERE.items() if re.search(pattern, text, re.MULTILINE))
    return block.not_run or next(found, "")


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a page: its own programs first, 80 columns, one thread."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "NO_COLOR": "1"}


def call(words: list[str], folder: Path, patience: float, ends: bool) -> tuple[int, str, float]:
    """Run a program in a folder: exit code, what it printed, seconds of CPU. One without an end is interrupted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        words, cwd=folder, env=surroundings(folder), text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=patience)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT if not ends else signal.SIGKILL)
        printed, _ = process.communicate()
        orderly = not ends and process.returncode in INTERRUPTED
        code = 0 if orderly else process.returncode or 1
        printed += f"\n[interrupted after {patience:g} s, exit code {process.returncode}]"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, printed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run_shell(block: Block, folder: Path, assigned: list[str]) -> Iterator[Outcome]:
    """Run the commands of a shell block in order; assignments such as BASE="..." hold for the whole page."""
    for command in block.commands:
        if re.match(r"\w+=", command):
            assigned.append(command)
            continue
        name = (re.match(r"fathoms (\w+)", command) or ["", ""])[1]
        line = "\n".join([*assigned, command if block.printed else made_small(command)])
        ends = block.printed is not None or name not in PATIENCE
        patience = COMMAND_SECONDS * (5 if block.printed else 1) if ends else PATIENCE[name]
        # A shown output may come with exit 1: `data check` answers so where it finds bad files.
        code, printed, seconds = call(["bash", "-c", line], folder, patience, ends)
        failed = code and not (block.printed and code == 1)
        yield Outcome(where(block), command, "failed" if failed else "ok", seconds, printed)


class Interpreter:
    """Python in a process of its own, in which the blocks of a page follow each other."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _INTERPRETER], cwd=folder, env=surroundings(folder), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, block: Block) -> Outcome:
        """Run one block; what it printed is the detail."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            self.process.stdin.write(json.dumps([where(block), block.code]) + "\n")
            self.process.stdin.flush()
            ok, printed, seconds = json.loads(self.process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            ok, printed, seconds = False, "the interpreter has ended", 0.0
        what = first_line(block.code)
        return Outcome(where(block), what, "ok" if ok else "failed", seconds, printed)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


_INTERPRETER = f"""
import contextlib, io, json, os, signal, sys, time, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
space = {{"__name__": "__main__"}}
exec({PRELUDE!r}, space)
for line in sys.stdin:
    place, code = json.loads(line)
    printed, ok, began = io.StringIO(), True, time.process_time()
    signal.alarm({COMMAND_SECONDS})
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, place, "exec"), space)
        except Exception:
            ok = False
            print(traceback.format_exc(limit=-1))
    signal.alarm(0)
    answers.write(json.dumps([ok, printed.getvalue(), time.process_time() - began]) + "\\n")
    answers.flush()
"""


def run_example(path: Path) -> Outcome:
    """Run an example in an empty folder; it must end well and within its time."""
    place = str(path.relative_to(ROOT))
    words = [sys.executable, str(path)]
    if path.suffix == ".ipynb":
        words = [sys.executable, "-c", _RUN_NOTEBOOK, str(path)]
        if importlib.util.find_spec("nbclient") is None:
            return Outcome(place, "notebook", "not run", detail="needs pip install '.[notebook]'")
    with tempfile.TemporaryDirectory() as folder:
        code, printed, seconds = call(words, Path(folder), 10 * EXAMPLE_SECONDS, True)
    late = seconds > EXAMPLE_SECONDS
    said = printed + (f"\ntook {seconds:.0f} s of CPU, more than {EXAMPLE_SECONDS}" if late else "")
    return Outcome(place, "example", "failed" if code or late else "ok", seconds, said)


_RUN_NOTEBOOK = """
import sys, nbclient, nbformat
nbclient.NotebookClient(nbformat.read(sys.argv[1], 4), timeout=600).execute()
"""


def run_page(page: Path, ready: Path, shown: bool, write: bool) -> Iterator[Outcome]:
    """Run the blocks of a page in a copy of the folder that is set up for it, and compare what is shown."""
    blocks = [block for block in blocks_of(page) if block.kind in ("python", "shell")]
    text = page.read_text()
    with tempfile.TemporaryDirectory() as name:
        folder, assigned = Path(name) / "stage", list[str]()
        subprocess.run(["cp", "-r", ready, folder], check=True)
        python = Interpreter(folder)
        written = []
        for block in blocks:
            if why := elsewhere(block):
                if not shown:
                    yield Outcome(where(block), first_line(block.code), "not run", detail=why)
                continue
            if shown and block.kind == "shell" and block.printed is None:
                continue
            runs = [python.run(block)] if block.kind == "python" else run_shell(block, folder, assigned)
            done = []
            for outcome in runs:
                done.append(outcome)
                yield outcome
            if block.printed is not None and all(outcome.status == "ok" for outcome in done):
                now = told("".join(outcome.detail for outcome in done), block.printed.code)
                written.append((block.printed, now))
                wrong = [] if write else differing(block.printed.code.splitlines(), now)
                if wrong:
                    yield Outcome(where(block.printed), "output", "failed", detail="\n".join(wrong))
        python.close()
    if write and not rewritten(page, text, written):
        what = "was changed meanwhile; nothing is written"
        yield Outcome(str(page.relative_to(ROOT)), "page", "failed", detail=what)


def rewritten(page: Path, text: str, outputs: list[tuple[Block, list[str]]]) -> bool:
    """Write outputs into their page, unless somebody has changed it."""
    if page.read_text() != text:
        return False
    lines = text.splitlines()
    for old, now in reversed(outputs):
        lines[old.line - 1 : old.line - 1 + len(old.code.splitlines())] = now
    page.write_text("\n".join(lines) + "\n")
    return True


def where(block: Block) -> str:
    """The page and line of a block."""
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def first_line(code: str) -> str:
    """The first line of some code that is neither empty nor an import."""
    lines = [line for line in code.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(("import", "from", ")"))), lines[0])


def show(outcome: Outcome) -> None:
    """Print an outcome as a line, and what it printed if it failed."""
    time_taken = f"{outcome.seconds:6.1f} s" if outcome.status != "not run" else " " * 8
    note = f"   [{outcome.detail}]" if outcome.status == "not run" else ""
    print(f"{outcome.status:<8} {time_taken}  {outcome.place}  {outcome.what[:110]}{note}", flush=True)
    if outcome.status == "failed":
        print("    " + "\n    ".join(outcome.detail.strip().splitlines()[-40:]), flush=True)


def main() -> int:
    """Run what is given, or everything; 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="pages and examples; default: all")
    parser.add_argument("--shown", action="store_true", help="only blocks whose output a page shows")
    parser.add_argument("--write", action="store_true", help="write what they print into the pages")
    args = parser.parse_args()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if shown := args.shown or args.write:
        pages = [page for page in pages if any(block.printed for block in blocks_of(page))]
    every = pages if shown else [*pages, *sorted((ROOT / "examples").iterdir())]
    # In the background of a script SIGINT is ignored, and programs inherit that: none of them could be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    paths = [path.resolve() for path in args.paths] or every
    began, outcomes = time.monotonic(), list[Outcome]()
    with tempfile.TemporaryDirectory() as ready:
        blocks = (block for path in paths if path.suffix == ".md" for block in blocks_of(path))
        set_up(Path(ready), "".join(block.code for block in blocks if not elsewhere(block)))
        for path in paths:
            if path.suffix == ".md":
                found = run_page(path, Path(ready), shown, args.write)
            elif path.suffix in (".py", ".ipynb") and path.name != "serve.py":
                found = iter([run_example(path)])
            else:
                continue
            for outcome in found:
                outcomes.append(outcome)
                show(outcome)
    counts = Counter(outcome.status for outcome in outcomes)
    reasons = Counter(outcome.detail for outcome in outcomes if outcome.status == "not run")
    seconds = time.monotonic() - began
    print(f"{counts['ok']} ok, {counts['failed']} failed, {counts['not run']} not run; {seconds:.0f} s")
    for reason, count in reasons.most_common():
        print(f"  not run: {count} x {reason}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
