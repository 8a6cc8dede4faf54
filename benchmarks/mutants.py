"""Mutants: faults planted one at a time where a wrong number would be silent; those that no test notices are named.

python benchmarks/mutants.py [--number 300] [--seed 0] [--only parts/] [--rooms contracts] [--again]

MUTANTS_AT_ONCE says how many are judged at a time (2).

One process imports fathoms and the tests. For each mutant it forks: the child takes the changed code into the functions
that have it, and runs the tests that enter the line. What was judged is kept under --build and not judged
again, but for survivors with --again.
"""

import argparse
import contextlib
import gc
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType, FunctionType

import pytest
import torch._dynamo  # noqa: F401  # imported once, before the processes of the mutants are forked
import torchvision  # noqa: F401

from mutants_source import mutants, planted

ROOT, SLOTS = Path(__file__).parents[1], int(os.environ.get("MUTANTS_AT_ONCE", "2"))
# Seconds that the chosen tests of a mutant took when they were traced; a traced test and a traced file; a mutant's own.
TESTS, LONG, FILE, LIMIT = 15, 20, 900, 240
BROKEN = 77
WHERE = r"parts/|evaluating/|surgery/|comparing/.*(statistic|verdict|look|tuning|arms)|data/.*(split|crop|sampler)"
WHERE += r"|training/.*(step|guard|optim|muon|objective|penalt|learner|measure)"
ROOMS = "contracts models comparing surgery evaluating training data cli probes base verbs parity"
WORDS = ["-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys", "-m"]
WORDS += ["not full and not gpu and not kernels and not compile and not clock and not slow"]


def pool(jobs, scratch):
    """Forks a child for each job (key, work, limit), SLOTS at a time; yields keys and what the work returned."""
    jobs, running = iter(jobs), {}
    slots = list(range(SLOTS))
    while True:
        while slots and (job := next(jobs, None)):
            key, work, limit = job
            slot = slots.pop()
            folder = scratch / str(slot)
            (folder / "answer").unlink(missing_ok=True)
            if not (child := os.fork()):
                _work(work, folder)
            running[child] = key, slot, time.monotonic() + limit
        if not running:
            return
        time.sleep(0.02)
        for child, (key, slot, end) in list(running.items()):
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if not ended:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            del running[child]
            slots.append(slot)
            answer, code = scratch / str(slot) / "answer", os.waitstatus_to_exitcode(status)
            if code == BROKEN:
                raise SystemExit((scratch / str(slot) / "log").read_text())
            died = "time" if code == -signal.SIGKILL else f"exit {code}"
            yield key, json.loads(answer.read_text()) if answer.is_file() else {"died": died}


def _work(work, folder):
    """In the child: do the work and leave, without a word of what the parent holds."""
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    code = BROKEN
    try:
        answer = json.dumps(work(folder))
        (folder / "unfinished").write_text(answer)
        (folder / "unfinished").rename(folder / "answer")
        code = 0
    except BaseException:  # noqa: BLE001  # the child ends here, whatever it was
        import traceback

        traceback.print_exc(file=sys.__stderr__)
    finally:
        sys.__stderr__.flush()
        os._exit(code)


class Watch:
    """A plugin of pytest: which tests ran, and which of them failed; with `trace`, the lines that each entered."""

    def __init__(self, trace=False):
        self.trace, self.failed, self.record = trace, [], {}
        self.lines, self.fixtures = set(), {}

    def enter(self, frame, event, _arg):
        code = frame.f_code
        if not TRACED.match(code.co_filename):
            return None
        self.lines.add((code.co_filename, code.co_firstlineno if event == "call" else frame.f_lineno))
        return self.enter

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before, self.lines = self.lines, set()
        value = yield
        if fixturedef.scope != "function":
            self.fixtures[fixturedef.argname] = set(self.lines)
        self.lines |= before
        return value

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        if not self.trace:
            return (yield)
        self.lines, failed, start = set(), len(self.failed), sum(os.times()[:4])
        signal.setitimer(signal.ITIMER_PROF, LONG), sys.settrace(self.enter), threading.settrace(self.enter)
        done = yield
        signal.setitimer(signal.ITIMER_PROF, 0), sys.settrace(None), threading.settrace(None)
        for name in item.fixturenames:
            self.lines |= self.fixtures.get(name, set())
        entered = defaultdict(list)
        for file, line in sorted(self.lines):
            entered[str(Path(file).relative_to(ROOT))].append(line)
        if len(self.failed) == failed:
            self.record[item.nodeid] = {"seconds": sum(os.times()[:4]) - start, "lines": entered}
        return done

    def pytest_runtest_logreport(self, report):
        self.failed += [report.nodeid] if report.failed else []


def _too_long(*_):
    raise TimeoutError("a traced test took too long")


TRACED = re.compile(rf"{re.escape(str(ROOT))}/src/fathoms/({WHERE})")


def run(items, folder, trace=False):
    """Runs collected tests in a child: all of them for a trace, else up to the first that fails."""
    if not items:
        return {"failed": []}
    config, watch = items[0].config, Watch(trace)
    signal.signal(signal.SIGPROF, _too_long)
    config.pluginmanager.register(watch)
    base = folder / "tmp"
    shutil.rmtree(base, ignore_errors=True)
    config._tmp_path_factory._given_basetemp, config._tmp_path_factory._basetemp = base, None
    for item, after in zip(items, [*items[1:], None], strict=True):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
        if watch.failed and not trace:
            break
    return watch.record if trace else {"failed": watch.failed}


def halves(old: CodeType, new: CodeType):
    """Pairs of the code objects of a module that differ, outer ones first."""
    inner = [[const for const in code.co_consts if isinstance(const, CodeType)] for code in (old, new)]
    consts = [[const for const in code.co_consts if not isinstance(const, CodeType)] for code in (old, new)]
    deeper = [pair for both in zip(*inner, strict=False) for pair in halves(*both)]
    if len(inner[0]) != len(inner[1]) or repr(consts[0]) != repr(consts[1]) or old.co_code != new.co_code:
        yield old, new, True
    elif deeper or old.co_names != new.co_names:
        yield old, new, old.co_names != new.co_names
    yield from deeper


def swaps(mutant):
    """The code to swap by name and first line; None where it is run at import, so that a swap comes too late."""
    path, old = str(ROOT / mutant["file"]), (ROOT / mutant["file"]).read_text()
    pairs = list(halves(*(compile(text, path, "exec", dont_inherit=True) for text in (old, mutant["body"]))))
    if any(own and not code.co_flags & 0x2 for code, _, own in pairs):
        return None
    if any(code.co_freevars != new.co_freevars for code, new, _ in pairs):
        return None
    return {(code.co_qualname, code.co_firstlineno): new for code, new, _ in pairs if code.co_flags & 0x2}


def plant(mutant, folder):
    """A tree with the mutant in it, for the processes that a test starts; the first on their path."""
    shutil.rmtree(folder / "src", ignore_errors=True)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / mutant["file"]).write_text(mutant["body"])
    os.environ["PYTHONPATH"] = f"{folder}/src"


def judged_warm(mutant, tests, items):
    """The work of a child of the process that has imported everything."""

    def work(folder):
        plant(mutant, folder)
        path, codes = str(ROOT / mutant["file"]), swaps(mutant)
        for found in gc.get_objects():
            if type(found) is FunctionType and found.__code__.co_filename == path:
                code = found.__code__
                found.__code__ = codes.get((code.co_qualname, code.co_firstlineno), code)
        return run([items[name] for name in tests], folder)

    return work


def judged_cold(mutant, tests):
    """The work of a child of the process before fathoms was imported."""

    def work(folder):
        plant(mutant, folder)
        sys.path.insert(0, f"{folder}/src")
        collected = Collected(lambda items: failed.extend(run(items, folder)["failed"]), set(tests))
        failed = []
        code = pytest.main([*dict.fromkeys(name.partition("::")[0] for name in tests), *WORDS], [collected])
        return {"failed": failed or ([] if code == 0 else ["collection"])}

    return work


class Collected:
    """A plugin of pytest: does its own work with the collected tests in place of running them."""

    def __init__(self, work, names=None):
        self.work, self.names = work, names

    def pytest_runtestloop(self, session):
        items = [item for item in session.items if self.names is None or item.nodeid in self.names]
        self.work(items)
        return True


def chosen(tests, mutant, seconds):
    """The tests that enter the line of a mutant, else its function, else its file; quick ones first, while they fit."""
    near = {
        name: set(t["lines"][mutant["file"]]) for name, t in tests.items() if mutant["file"] in t["lines"]
    }
    found = [[name for name in near if mutant[place] in near[name]] for place in ("line", "function")]
    spent, fit = 0.0, []
    for name in sorted(next(filter(None, found), near), key=lambda name: tests[name]["seconds"]):
        spent += tests[name]["seconds"]
        fit += [name] if spent < seconds or not fit else []
    return fit


def asked(args):
    """The mutants that were asked for, the planted ones first, and how many there could be."""
    names = [str(source.relative_to(ROOT)) for source in sorted((ROOT / "src/fathoms").rglob("*.py"))]
    names = [name for name in names if re.match(rf"src/fathoms/({WHERE})", name)]
    every = [mutant for name in names for mutant in mutants(name, (ROOT / name).read_text())]
    # By a hash of each one's words, so that a change of src changes little of the sample.
    order = {name: hashlib.sha256(f"{args.seed} {name}".encode()).digest() for name in map(named, every)}
    sample = sorted(every, key=lambda mutant: order[named(mutant)])[: args.number]
    return [*planted(ROOT), *sample], len(every)


def named(mutant):
    """What tells a mutant from all others, wherever its line has gone."""
    return " | ".join(map(str, (mutant[key] for key in ("file", "kind", "old", "new", "place"))))


def traces(args, items, scratch):
    """The lines that each test enters, file by file; those of a file that has not changed are kept."""
    files, tests = defaultdict(list), {}
    for item in items:
        files[item.nodeid.partition("::")[0]].append(item)
    kept = {}
    for file in files:
        digest = hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:16]
        kept[file] = args.build / f"{file.replace('/', '.')}.{digest}.json"
    new = [file for file in files if not kept[file].is_file()]
    jobs = ((file, lambda folder, file=file: run(files[file], folder, trace=True), FILE) for file in new)
    for file, record in pool(jobs, scratch):
        said = record.get("died") or f"{len(record)} of {len(files[file])} tests"
        print(f"traced {file}: {said}", flush=True)
        kept[file].write_text(json.dumps({} if "died" in record else record))
    for file in files:
        tests |= json.loads(kept[file].read_text())
    return tests


def write(args, wanted, verdicts, possible):
    """results/mutants.json: the counts, and the survivors with the reasons that were written beside them."""
    path = ROOT / "results/mutants.json"
    before = json.loads(path.read_text())["survivors"] if path.is_file() else []
    reasons = {(old["file"], old["old"], old["new"]): old["reason"] for old in before if "reason" in old}
    judged = [(mutant, verdicts[named(mutant)]) for mutant in wanted if named(mutant) in verdicts]
    survivors = []
    for mutant, verdict in judged:
        if verdict["caught"] is None:
            row = {key: mutant[key] for key in ("file", "line", "kind", "old", "new")}
            reason = reasons.get((mutant["file"], mutant["old"], mutant["new"]))
            survivors.append(row | ({"reason": reason} if reason else {}))
    faults = [
        {"file": m["file"], "old": m["old"], "new": m["new"], "caught": verdict["caught"]}
        for m, verdict in judged
        if m["kind"] == "planted"
    ]
    counts = {"possible": possible, "mutants": len(judged), "caught": len(judged) - len(survivors)}
    record = {"seed": args.seed, **counts, "survivors": survivors, "planted": faults}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return counts


def judge(args, wanted, possible, jobs, scratch):
    """Judges mutants and keeps each verdict at once."""
    by_name, place = {named(mutant): mutant for mutant in wanted}, args.build / "verdicts.jsonl"
    for name, answer in pool(jobs, scratch):
        caught = answer.get("died") or next(iter(answer["failed"]), None)
        with place.open("a") as file:
            file.write(json.dumps({"mutant": name, "caught": caught}) + "\n")
        mutant = by_name[name]
        print(
            *(mutant[key] for key in ("file", "line", "old", "new")), "->", caught or "SURVIVES", flush=True
        )
        write(args, wanted, verdicts_of(args), possible)


def verdicts_of(args):
    """The verdicts that are kept, later ones in place of earlier ones."""
    place = args.build / "verdicts.jsonl"
    rows = [json.loads(line) for line in place.read_text().splitlines()] if place.is_file() else []
    return {row["mutant"]: row for row in rows}


def main():
    """Traces the tests, judges the mutants whose code can be swapped, then those that need a fresh import."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag, default in {
        "number": 300,
        "seed": 0,
        "only": "",
        "rooms": ROOMS,
        "build": ROOT / "build/mutants",
    }.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default)
    parser.add_argument("--again", action="store_true", help="judge the survivors again, by more tests")
    args = parser.parse_args()
    args.build.mkdir(exist_ok=True, parents=True)
    os.chdir(ROOT)
    wanted, possible = asked(args)
    known = {
        name: row for name, row in verdicts_of(args).items() if not (args.again and row["caught"] is None)
    }
    left = [m for m in wanted if named(m) not in known and re.search(args.only, m["file"])]
    # A second judgement is by all tests that reach it.
    seconds = LIMIT / 2 if args.again else TESTS
    scratch = Path(tempfile.mkdtemp(prefix="mutants-"))
    for slot in range(SLOTS):
        (scratch / str(slot)).mkdir()

    def warm(items):
        # What a test would import later would come without the mutant.
        for name in sorted({mutant["file"] for mutant in left}):
            importlib.import_module(
                name.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            )
        by_id = {item.nodeid: item for item in items}
        named_tests = {
            named(m): [name for name in by_id if name.startswith("tests/" + m["tests"])]
            for m in left
            if m["kind"] == "planted"
        }
        jobs = (
            (named(m), judged_warm(m, named_tests[named(m)], by_id), LIMIT)
            for m in left
            if named_tests.get(named(m))
        )
        judge(args, wanted, possible, jobs, scratch)
        tests = traces(args, items, scratch) if args.number else {}
        (scratch / "tests.json").write_text(json.dumps(tests))
        swapped = [m for m in left if m["kind"] != "planted" and swaps(m) is not None]
        # With some of the rooms alone, what their tests do not enter is not judged.
        picked = ((m, chosen(tests, m, seconds)) for m in swapped)
        picked = ((m, names) for m, names in picked if names or args.rooms == ROOMS)
        jobs = ((named(m), judged_warm(m, names, by_id), LIMIT) for m, names in picked)
        judge(args, wanted, possible, jobs, scratch)

    if not (child := os.fork()):
        sys.path.insert(0, str(ROOT / "src"))
        os._exit(pytest.main([*(f"tests/{room}" for room in args.rooms.split()), *WORDS], [Collected(warm)]))
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"the process of the tests ended with {code}")
    tests = json.loads((scratch / "tests.json").read_text())
    cold = [m for m in left if m["kind"] != "planted" and swaps(m) is None]
    picked = ((m, names) for m in cold if (names := chosen(tests, m, seconds)))
    jobs = ((named(m), judged_cold(m, names), 2 * LIMIT) for m, names in picked)
    judge(args, wanted, possible, jobs, scratch)
    shutil.rmtree(scratch)
    counts = write(args, wanted, verdicts_of(args), possible)
    print("{caught} of {mutants} caught; survivors in results/mutants.json".format(**counts))


if __name__ == "__main__":
    main()
