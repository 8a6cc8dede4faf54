"""The `fathoms` command: finds the command's module, and turns a user's mistake into one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from fathoms import __version__
from fathoms.errors import FathomsError, printable
from fathoms.registry import nearest

COMMANDS = {
    "train": "train a model; run the same command again to go on",
    "compare": "train variants over seeds and say which differences hold",
    "validate": "measure a trained model",
    "report": "write a page about a run: curves, settings, norms by layer",
    "recipes": "list the training recipes, or show one",
    "data check": "decode a whole data set and name every bad file",
    "data pack": "re-encode a data set once, into shards that load faster",
    "data info": "what a data set holds and which decoder reads it",
    "export": "write a model for use elsewhere: ONNX, torch.export, safetensors, timm",
    "predict": "classify pictures, and show where the model looked",
    "convert": "turn a stranger's .pth into safetensors, safely",
    "models": "list the models, or show one",
    "parts": "list the parts that each switch picks from",
    "bench": "measure how fast a model trains or answers, also beside timm's",
    "probe": "see, before training, whether the signal survives the depth",
}

USAGE_ERROR = 2


def overview() -> str:
    """The help of the command itself."""
    width = max(len(name) for name in COMMANDS)
    rows = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: fathoms COMMAND [...]\n\n"
        "Build, train, compare, understand and ship deep Vision Transformers.\n\n"
        f"commands:\n{rows}\n\n"
        "examples:\n"
        "  fathoms probe --depth 48 --residual layerscale\n"
        "  fathoms COMMAND --help"
    )


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """The command, of one word or two, and the words after it."""
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, list(words[length:])
    hint = nearest(words[0], COMMANDS)
    raise FathomsError(f"no command is called {words[0]!r}; did you mean {hint!r}?")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 2 a user's mistake, 130 Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    name = ""
    try:
        name, rest = split_command(words)
        from fathoms.cli.parse import parse

        module = importlib.import_module(f"fathoms.cli.{name.replace(' ', '_')}")
        code = module.run(parse(module, name, rest))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except FathomsError as error:
        with contextlib.suppress(OSError):
            # Some errors begin with the name of the function, which is that of the command.
            told = str(error).removeprefix(f"{name}: ")
            print(f"fathoms {name}: {told}".replace("fathoms : ", "fathoms: "), file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as `| head` does. Nothing more can be said there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # A folder without permission, a full disk: the system's word on it, and the place, say enough.
        place = f"{error.filename}: " if error.filename else ""
        print(printable(f"fathoms {name}: {place}{error.strerror or error}"), file=sys.stderr)
        return USAGE_ERROR


def command() -> NoReturn:
    """The process of its own that a shell or a launcher starts."""
    try:
        code = main()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    # Only what has been imported can have joined other processes.
    distributed = sys.modules.get("fathoms.train.distributed")
    if distributed is not None and "RANK" in os.environ:
        distributed.exit_rank(code)
    sys.exit(code)
