"""Print a completion script for bash or zsh: commands, flags, and the values of a flag that has a list of them."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tyro

EXAMPLES = """
fathoms completion bash > ~/.local/share/bash-completion/completions/fathoms
echo 'eval "$(fathoms completion zsh)"' >> ~/.zshrc                # after compinit
"""

# `words` of bash and zsh begin with "fathoms"; a name of two words, such as "data check", is one command.
_BASH = """
_fathoms() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}
  [[ $command == data && COMP_CWORD -gt 2 ]] && command="data ${COMP_WORDS[2]}"
  if (( COMP_CWORD == 1 )); then COMPREPLY=($(compgen -W '@FIRST@' -- "$current")); return; fi
  if [[ $command == data ]]; then COMPREPLY=($(compgen -W '@DATA@' -- "$current")); return; fi
  local flags='' values=''
  case $command in
@FLAGS@
  esac
  case "$command $before" in
@VALUES@
  esac
  if [[ -n $values ]]; then COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [[ $current == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$current"))
  else COMPREPLY=(); fi
}
complete -o default -F _fathoms fathoms
"""
# zsh runs the function above through its own emulation of bash's completion, which has no compopt: that file names
# follow where nothing else does is said by `-o default`, which both know.
_ZSH = "autoload -Uz bashcompinit && bashcompinit\n"


@dataclass(frozen=True)
class Args:
    """Options of `fathoms completion`."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """The shell."""


def run(args: Args) -> int:
    """Print the script."""
    print((_ZSH if args.shell == "zsh" else "") + script().strip())
    return 0


def script() -> str:
    """The completion function of bash, with every command of today."""
    from fathoms.cli.main import COMMANDS, module_of

    flags, values = [], []
    for name in COMMANDS:
        arguments = module_of(name).Args
        options = dict(_options(arguments))
        flags.append(f"    {shlex.quote(name)}) flags={shlex.quote(' '.join([*options, '--help']))} ;;")
        values += [
            f"    {shlex.quote(f'{name} {flag}')}) values={shlex.quote(' '.join(choices))} ;;"
            for flag, choices in options.items()
            if choices
        ]
    first = dict.fromkeys(name.split()[0] for name in COMMANDS)
    second = (name.split()[1] for name in COMMANDS if " " in name)
    filled = _BASH.replace("@FIRST@", " ".join(first)).replace("@DATA@", " ".join(second))
    return filled.replace("@FLAGS@", "\n".join(flags)).replace("@VALUES@", "\n".join(values))


def _options(cls: type) -> Iterator[tuple[str, list[str]]]:
    """Each flag of a dataclass of arguments with the values it can take, where they are a list."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        kind, extras = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        if dataclasses.is_dataclass(kind):
            yield from _options(typing.cast(type, kind))
        elif tyro.conf.Positional not in extras:
            yield f"--{name.replace('_', '-')}", _choices(kind)


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, also inside of Optional."""
    if typing.get_origin(kind) is Literal:
        return [str(value) for value in typing.get_args(kind)]
    return [choice for option in typing.get_args(kind) for choice in _choices(option)]
