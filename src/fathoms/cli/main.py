"""The `fathoms` command: runs the module of a subcommand, and prints a user's mistake as one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from fathoms.cli.terminal.streams import lost_output, make_safe
from fathoms.errors import FathomsError, printable
from fathoms.machine import running, set_openmp
from fathoms.registry import nearest
from fathoms.version import __version__

GROUPS = {
    "train": {
        "train": "train a model; the same command again resumes",
        "validate": "measure a trained model: accuracy, calibration, robustness",
        "recipes": "list the training recipes, or show one",
    },
    "compare": {
        "compare": "train variants over seeds and say which differences hold",
        "report": "write the page of a run, a comparison or several runs",
    },
    "look": {
        "probe": "see inside a model: verdict, table and pictures by block",
        "cost": "parameters, multiplications, memory and time by part",
        "bench": "measure images per second, also against timm",
        "models": "list the models, or show one",
        "parts": "list the parts that each model option selects from",
    },
    "ship": {
        "predict": "classify images, and draw attention maps",
        "export": "write ONNX, torch.export, safetensors or timm's layout",
        "convert": "turn an untrusted .pth into safetensors",
    },
    "data": {
        "data check": "decode a whole data set and list every bad file",
        "data pack": "re-encode a data set into shards that load faster",
        "data info": "show the contents of a data set and its decoder",
    },
}
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}

USAGE_ERROR = 2
INTERRUPTED = 130


def overview() -> str:
    width = max(len(name) for name in COMMANDS)
    groups = [
        "\n".join([group, *(f"  {name:<{width}}  {summary}" for name, summary in commands.items())])
        for group, commands in GROUPS.items()
    ]
    head = "usage: fathoms COMMAND [...]", "Build, train, understand and ship deep Vision Transformers."
    return "\n\n".join([*head, *groups, "examples\n  fathoms train\n  fathoms COMMAND --help"])


def commands_of(group: str) -> str:
    """The commands whose first word is `group`, one on each line; empty if it is not a group."""
    own = {name: summary for name, summary in COMMANDS.items() if name.startswith(f"{group} ")}
    width = max(map(len, own), default=0)
    rows = "\n".join(f"  fathoms {name:<{width}}  {summary}" for name, summary in own.items())
    return f"usage: fathoms {group} COMMAND [...]\n\ncommands:\n{rows}" if own else ""


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command, of one word or two, and the words after it."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, list(words[length:])
    # A word of a group is mistyped, or a command.
    typed = " ".join(words[:2]) if commands_of(words[0]) else words[0]
    near = nearest(typed, COMMANDS)
    advice = f"did you mean {near!r}?" if near else "see `fathoms --help`"
    raise FathomsError(f"no command is called {typed!r}; {advice}")


LISTS = {"models": "Models", "parts": "Parts", "recipes": "Recipes", "data info": "DataInfo"}
"""Commands that share a module, and their classes there."""


def module_of(command: str) -> Any:
    """The module or class of a command: EXAMPLES, Args and run."""
    if command in LISTS:
        return getattr(importlib.import_module("fathoms.cli.lists"), LISTS[command])
    return importlib.import_module(f"fathoms.cli.{command.replace(' ', '_')}")


def front_page(words: Sequence[str]) -> str | None:
    """The page that is printed without running a command: overview, version, commands of a group; else None."""
    if not words or words[0] in ("-h", "--help", "help"):
        return overview()
    if words[0] == "--version":
        return __version__
    if words[1:2] in ([], ["-h"], ["--help"], ["help"]):
        return commands_of(words[0]) or None
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 2 a user's mistake, 130 Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = ""
    try:
        code = 0
        if (page := front_page(words)) is not None:
            print(page)
        else:
            name, rest = split_command(words)
            from fathoms.cli.flags.parse import parse

            module = module_of(name)
            with running(words):
                code = module.run(parse(module, name, rest))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except FathomsError as error:
        with contextlib.suppress(OSError):
            # Some messages begin with the name of the function, which is that of the command.
            message = str(error).removeprefix(f"{name}: ")
            print(f"fathoms {name}: {message}".replace("fathoms : ", "fathoms: "), file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # No permission, a full disk: the system's message with the path is enough.
        place = f"{error.filename}: " if error.filename else ""
        print(printable(f"fathoms {name}: {place}{error.strerror or error}"), file=sys.stderr)
        return USAGE_ERROR


def one_line_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as a line, without the place in the source that it comes from."""
    if sys.stderr is not None:
        print(printable(f"warning: {' '.join(str(message).split())}"), file=sys.stderr)


def interrupt(_number: int, frame: FrameType | None) -> NoReturn:
    """Ctrl-C: raise KeyboardInterrupt, but leave at once while a module is being imported.

    An import may swallow the exception, as numpy's does, and the command would go on with half a module.
    """
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def command() -> NoReturn:
    """Entry point of the process that a shell or a launcher starts."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    warnings.showwarning = one_line_warning
    make_safe()
    set_openmp()
    try:
        code = main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    # As the interpreter would, and then leave the other ranks in order.
    except Exception as error:  # noqa: BLE001
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    if lost := lost_output():
        name = next((known for known in COMMANDS if f"{' '.join(sys.argv[1:])} ".startswith(f"{known} ")), "")
        print(
            f"{f'fathoms {name}'.strip()}: standard output cannot be written ({lost}); what was printed is lost",
            file=sys.stderr,
        )
        code = code or 1
    # Ranks can have been joined only if the module has been imported. A single process, too, would spend seconds on
    # taking torch's modules apart after its last line.
    distributed = sys.modules.get("fathoms.training.distributed")
    if distributed is not None:
        distributed.exit_rank(code)
    sys.exit(code)
