"""Mutants of a source file: operators, comparisons, constants, off by one, swapped arguments, dropped calls."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SHOWN = ("__repr__", "__str__", "extra_repr", "describe")
# Calls that give the same when their first two arguments change places, or would not run.
SYMMETRIC = (
    "max",
    "min",
    "maximum",
    "minimum",
    "gcd",
    "hypot",
    "transpose",
    "allclose",
    "isclose",
    "cast",
    "isinstance",
)
OTHER = {
    "Lt": "LtE",
    "Gt": "GtE",
    "Eq": "NotEq",
    "Is": "IsNot",
    "In": "NotIn",
    "And": "Or",
    "Add": "Sub",
    "Mult": "Div",
}
OTHER |= {new: old for old, new in OTHER.items()} | {"FloorDiv": "Mult", "Pow": "Mult", "Mod": "FloorDiv"}


# Faults that a suite of 6,000 tests once let pass: file, what stood there, what is planted, the tests that must see it.
PLANTED = (
    (
        "cli/validate.py",
        "ema=args.use_ema, **size",
        "ema=True, **size",
        "cli/test_validate.py::test_averaged_weights",
    ),
    (
        "comparing/verdicts.py",
        "2 * ALPHA / max(1, total)) / 2",
        "2 * ALPHA) / 2",
        "comparing/test_verdicts.py::test_equivalence_is_tested",
    ),
    (
        "comparing/arms.py",
        "len(self.scores) + len(self.diverged)",
        "len(self.scores) + len(self.diverged + self.failed)",
        "comparing/test_verdicts.py::test_a_failed_run",
    ),
    (
        "comparing/results.py",
        'arm["stalled"], arm["failed"]',
        'arm["failed"], arm["stalled"]',
        "comparing/test_folder.py::test_stalled_and_failed",
    ),
    (
        "comparing/results.py",
        '"stalled": len(arm.stalled)',
        '"stalled": len(arm.failed)',
        "comparing/test_folder.py::test_stalled_and_failed",
    ),
    (
        "cli/probe.py",
        "args.model, switches, args.seed)",
        "args.model, switches, 0)",
        "cli/test_probe.py::test_another_seed",
    ),
    (
        "probes/signal.py",
        "stack[-1].stream, stack[0].stream",
        "self[-1].stream, stack[0].stream",
        "probes/test_signal.py::test_growth",
    ),
    (
        "probes/attention_maps.py",
        "(block + torch.eye(block.shape[-1]).to(block)) / 2 @ flow",
        "flow @ (block + torch.eye(block.shape[-1]).to(block)) / 2",
        "probes/test_attention_maps.py::test_rollout",
    ),
    (
        "surgery/new_norm.py",
        "stands[student.get_submodule(each.site.name)]",
        "stands[teacher.get_submodule(each.site.name)]",
        "surgery/test_swap.py::test_calibrate",
    ),
    (
        "surgery/norm_forms.py",
        "x = x - x.mean(-1, keepdim=True)",
        "x = x - x.mean(0, keepdim=True)",
        "surgery/test_swap.py::test_calibrate",
    ),
    (
        "surgery/norm_forms.py",
        "x * torch.rsqrt(x.square().mean(-1,",
        "x * torch.rsqrt(x.square().mean(0,",
        "surgery/test_swap.py::test_calibrate",
    ),
    (
        "training/step.py",
        "report.update + 1, settled",
        "report.update, settled",
        "training/test_ema.py::test_a_run_warms",
    ),
    (
        "training/step.py",
        "self.learner.ema is not None and not report.nonfinite",
        "self.learner.ema is not None",
        "training/test_step.py",
    ),
    (
        "training/step.py",
        "self.learner.scaler.unscale_(self.learner.optimizer)\n",
        "pass\n",
        "training/test_step.py::test_the_clipped",
    ),
    (
        "training/checkpoint_files.py",
        "(folder / entry).lstat()",
        "(folder / entry).stat()",
        "training/test_checkpoint.py::test_a_link",
    ),
    (
        "parts/rope.py",
        "torch.cat([row, column]",
        "torch.cat([column, row]",
        "contracts/test_positions.py::test_rotates_as_eva02_does",
    ),
    (
        "data/augment/pipeline.py",
        'self.seed, epoch, "policy"',
        '0, epoch, "policy"',
        "data/test_random_streams.py",
    ),
    (
        "data/augment/pipeline.py",
        'self.seed, epoch, "jitter"',
        'self.seed, epoch, "policy"',
        "data/test_random_streams.py",
    ),
    (
        "data/augment/pipeline.py",
        'self.seed, epoch, "erase"',
        '0, epoch, "erase"',
        "data/test_random_streams.py",
    ),
    ("data/augment/pipeline.py", 'self.seed, epoch, "mix"', '0, epoch, "mix"', "data/test_random_streams.py"),
    (
        "data/device_loader.py",
        'self.sampler.seed, epoch, "crop"',
        '0, epoch, "crop"',
        "data/test_random_streams.py",
    ),
)


def planted(root: Path) -> Iterator[dict]:
    """The mutants of PLANTED; each fault is planted in the one place where its text stands."""
    for name, old, new, tests in PLANTED:
        text = (root / f"src/fathoms/{name}").read_text()
        if text.count(old) != 1:
            raise SystemExit(f"mutants_source: {name} has {old!r} {text.count(old)} times; mend PLANTED")
        line = text[: text.index(old)].count("\n") + 1
        starts = [
            min(x.lineno for x in (node, *node.decorator_list))
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        what = {"file": f"src/fathoms/{name}", "line": line, "kind": "planted", "old": old, "new": new}
        yield what | {
            "function": max(starts, default=None),
            "place": 0,
            "tests": tests,
            "body": text.replace(old, new),
        }


def changed(node: ast.AST) -> Iterator[tuple[str, str]]:  # noqa: C901, one case each
    """The mistakes that could stand in the place of a node: a kind and the source text."""

    def but(**fields):
        return f"({ast.unparse(type(node)(**(dict(ast.iter_fields(node)) | fields)))})"

    def other(op):
        return getattr(ast, OTHER[type(op).__name__])()

    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", but(ops=[other(op)])
        case ast.BinOp(op=ast.MatMult()):
            yield "operator", but(left=node.right, right=node.left)
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op).__name__ in OTHER:
            yield "operator", but(op=other(op))
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "operator", f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", repr(value * 2 or 1.0)
        case ast.Call(func=func, args=[first, second, *rest]) if not ast.unparse(func).endswith(SYMMETRIC):
            yield "swapped arguments", but(args=[second, first, *rest])
        case ast.Expr(value=ast.Call()):
            yield "dropped call", "pass"


def mutants(path: str, text: str) -> Iterator[dict]:
    """Every mutant of a file; annotations, decorators, messages and what is only shown are left alone."""
    lines = text.splitlines(keepends=True)

    def walk(node, function):
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert) or getattr(node, "name", "") in SHOWN:
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        if isinstance(node, ast.FunctionDef):
            function = min(x.lineno for x in (node, *node.decorator_list))
        for kind, new in changed(node):
            head = lines[node.lineno - 1].encode()[: node.col_offset].decode()
            tail = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            body = "".join([*lines[: node.lineno - 1], head, new, tail, *lines[node.end_lineno :]])
            what = {
                "file": path,
                "line": node.lineno,
                "kind": kind,
                "old": ast.get_source_segment(text, node),
                "new": new,
            }
            yield what | {"function": function, "body": body}
        for field, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                    yield from walk(child, function)

    seen: Counter[tuple[str, str, str]] = Counter()
    for mutant in walk(ast.parse(text), None):
        what = mutant["kind"], mutant["old"], mutant["new"]
        yield mutant | {"place": seen[what]}
        seen[what] += 1
