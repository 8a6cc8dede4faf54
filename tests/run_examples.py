"""Run the examples, and the code blocks and commands of README and docs, as a reader would.

    python tests/run_examples.py                          # everything; `make examples`
    python tests/run_examples.py docs/probe.md examples/distil.py

Long commands run on tiny data (`doc_stage.py`). What cannot run here is counted and printed with its reason.
"""

from __future__ import annotations

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

from doc_blocks import Block, blocks_of, broken_promises
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
    """One thing that was run, or why it was not."""

    place: str
    what: str
    status: str
    seconds: float = 0.0
    detail: str = ""


def elsewhere(text: str) -> str:
    """Why a piece of code is not run here, or ""."""
    return next((why for pattern, why in ELSEWHERE.items() if re.search(pattern, text)), "")


def call(words: list[str], folder: Path, patience: float, ends: bool) -> tuple[int, str, float]:
    """Run a program in a folder: exit code, what it printed, seconds of CPU. One without an end is interrupted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
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


def run_commands(block: Block, place: str, folder: Path, assigned: list[str]) -> Iterator[Outcome]:
    """Run the commands of a shell block in order; assignments such as BASE="..." hold for the whole page."""
    for command in block.commands:
        why = block.not_run or elsewhere(command.text)
        if why:
            yield Outcome(place, command.text, "not run", detail=why)
        elif re.match(r"\w+=", command.text):
            assigned.append(command.text)
        else:
            name = (re.match(r"fathoms (\w+)", command.text) or ["", ""])[1]
            line = "\n".join([*assigned, made_small(command.text)])
            patience, ends = PATIENCE.get(name, COMMAND_SECONDS), name not in PATIENCE
            code, printed, seconds = call(["bash", "-c", line], folder, patience, ends)
            # `data check` answers 1 where it finds bad files, which is what it is for.
            broken = [] if line != command.text else broken_promises(command.promised, printed)
            told = "\n".join([*printed.splitlines()[-6:], *(f"promised: {line}" for line in broken)])
            yield Outcome(place, command.text, "failed" if code or broken else "ok", seconds, told)


def run_python(blocks: list[Block], folder: Path) -> Iterator[Outcome]:
    """Run the Python blocks of a page in order, in one namespace, each in its place."""
    wanted = []
    for block in blocks:
        # What a comment names is not needed to run the code.
        why = block.not_run or elsewhere(re.sub(r"#.*", "", block.code))
        if why:
            yield Outcome(where(block), first_line(block.code), "not run", detail=why)
        else:
            wanted.append(block)
    if not wanted:
        return
    script = folder / "blocks.json"
    script.write_text(json.dumps([[where(block), block.code] for block in wanted]))
    _, printed, seconds = call([sys.executable, "-c", _RUN_BLOCKS], folder, COMMAND_SECONDS, True)
    found = dict(re.findall(r"^@@ (\S+) (.+)$", printed, re.MULTILINE))
    for block in wanted:
        status = found.get(where(block), "not reached: the page took too long")
        told = status if status == "ok" else f"{status}\n{printed[-600:]}"
        share = seconds / len(wanted)
        yield Outcome(where(block), first_line(block.code), "ok" if status == "ok" else "failed", share, told)


_RUN_BLOCKS = f"""
import doctest, json, traceback
space = {{}}
exec({PRELUDE!r}, space)
for place, code in json.load(open("blocks.json")):
    try:
        if code.startswith(">>> "):
            test = doctest.DocTestParser().get_doctest(code, space, place, place, 0)
            failed = doctest.DocTestRunner().run(test, clear_globs=False).failed
            space.update(test.globs)
            print("@@", place, f"{{failed}} lines differ" if failed else "ok", flush=True)
        else:
            exec(compile(code, place, "exec"), space)
            print("\\n@@", place, "ok", flush=True)
    except Exception as error:
        traceback.print_exc(limit=-1)
        print("\\n@@", place, f"{{type(error).__name__}}: {{error}}".splitlines()[0], flush=True)
"""


def run_example(path: Path) -> Outcome:
    """Run an example in an empty folder; it must end well and within its time."""
    place = str(path.relative_to(ROOT))
    if path.suffix == ".ipynb":
        words = [sys.executable, "-c", _RUN_NOTEBOOK, str(path)]
        if importlib.util.find_spec("nbclient") is None:
            return Outcome(
                place,
                "notebook",
                "not run",
                detail="needs pip install '.[notebook]'",
            )
    else:
        words = [sys.executable, str(path)]
    with tempfile.TemporaryDirectory() as folder:
        code, printed, seconds = call(words, Path(folder), 10 * EXAMPLE_SECONDS, True)
    late = seconds > EXAMPLE_SECONDS
    told = printed[-1500:] + (f"\ntook {seconds:.0f} s of CPU, more than {EXAMPLE_SECONDS}" if late else "")
    return Outcome(place, "example", "failed" if code or late else "ok", seconds, told)


_RUN_NOTEBOOK = """
import sys, nbclient, nbformat
nbclient.NotebookClient(nbformat.read(sys.argv[1], 4), timeout=600).execute()
"""


def run_page(page: Path, ready: Path) -> Iterator[Outcome]:
    """Run the blocks of a page in a copy of the folder that is set up for it."""
    blocks = blocks_of(page)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "stage"
        subprocess.run(["cp", "-r", ready, folder], check=True)
        yield from run_python([block for block in blocks if block.kind == "python"], folder)
        assigned: list[str] = []
        for block in blocks:
            if block.kind == "shell":
                yield from run_commands(block, where(block), folder, assigned)


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
        print("    " + "\n    ".join(outcome.detail.strip().splitlines()), flush=True)


def main(given: list[str]) -> int:
    """Run what is given, or everything; 1 if something failed."""
    every = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").iterdir()),
    ]
    # In the background of a script SIGINT is ignored, and programs inherit that: none of them could be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    paths = [Path(name).resolve() for name in given] or every
    began, outcomes = time.monotonic(), []
    with tempfile.TemporaryDirectory() as ready:
        if any(path.suffix == ".md" for path in paths):
            set_up(Path(ready))
        for path in paths:
            if path.suffix == ".md":
                found = run_page(path, Path(ready))
            elif path.suffix in (".py", ".ipynb") and path.name != "serve.py":
                found = iter([run_example(path)])
            else:
                continue
            for outcome in found:
                outcomes.append(outcome)
                show(outcome)
    counts = Counter(outcome.status for outcome in outcomes)
    reasons = Counter(outcome.detail for outcome in outcomes if outcome.status == "not run")
    print(
        f"{counts['ok']} ok, {counts['failed']} failed, {counts['not run']} not run; {time.monotonic() - began:.0f} s"
    )
    for reason, count in reasons.most_common():
        print(f"  not run: {count} x {reason}")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
