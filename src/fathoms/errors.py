"""Errors that a user can cause. Each message is one line: where, what is wrong, what to do."""

from __future__ import annotations

# A name out of a file may be as long as the file; an error is still one readable line.
MAX_MESSAGE = 2000


def printable(text: str) -> str:
    r"""Text that is safe to print: characters that are not printable are written as escapes.

    Names of classes, files and tensors are untrusted. Printed raw they could move the cursor, recolour
    the terminal, forge a line of a log, or stop the print with an undecodable byte.

    >>> printable("cat\x1b[2J\n")
    'cat\\x1b[2J\\n'
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


def reason(error: BaseException, most: int = 160) -> str:
    r"""The reason of an exception on one line of at most `most` characters, for use inside a message.

    >>> reason(ValueError("no\n  such key"))
    'no such key'
    >>> reason(FileNotFoundError(2, "No such file or directory", "a.txt"))
    'No such file or directory'
    """
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:most] or type(error).__name__


def unforeseen(error: BaseException) -> str:
    """The words for an error that no check foresaw; its class is in the traceback, for whoever reports it.

    >>> unforeseen(KeyError("w"))
    "an error that fathoms did not foresee ('w')"
    """
    return f"an error that fathoms did not foresee ({reason(error)})"


def flag_of(option: str) -> str:
    """The flag of an option on the command line, as errors name it.

    >>> flag_of("clip_grad")
    '--clip-grad'
    """
    return f"--{option.replace('_', '-')}"


def flag_words(option: str, value: object) -> list[str]:
    """An option with its value, as it is typed on the command line.

    >>> flag_words("qkv_bias", False), flag_words("aa", None), flag_words("opt_betas", (0.9, 0.95))
    (['--no-qkv-bias'], ['--aa', 'none'], ['--opt-betas', '0.9', '0.95'])
    """
    if isinstance(value, bool):
        return [flag_of(option) if value else f"--no-{flag_of(option)[2:]}"]
    values = value if isinstance(value, tuple | list) else ("none" if value is None else value,)
    return [flag_of(option), *map(str, values)]


class FathomsError(Exception):
    """An error that the caller can correct; the message says how, on one printable line.

    >>> from fathoms import create_model
    >>> create_model("cait_s24_225")
    Traceback (most recent call last):
    fathoms.errors.UnknownNameError: model: no model is called 'cait_s24_225'; did you mean 'cait_s24_224'?
    """

    def __init__(self, message: str = "") -> None:
        line = printable(message[: MAX_MESSAGE + 1])
        super().__init__(line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "…")


class UnknownNameError(FathomsError):
    """A name that is not in its registry."""


class ConfigError(FathomsError):
    """Options that contradict each other, or a value out of range."""


class ShapeError(FathomsError):
    """A tensor whose shape the model cannot take."""


class WeightsError(FathomsError):
    """A weights file that does not fit the model, or that must not be opened."""


class BackendError(FathomsError):
    """A kernel that was requested by name and cannot run here."""
