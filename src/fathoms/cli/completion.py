"""Print a completion script for bash or zsh: commands, flags, and the values of a flag that has a list of them.

Names of models, recipes, presets and parts are those of the version that printed it.
"""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from fathoms.errors import flag_of

EXAMPLES = """
fathoms completion bash > ~/.local/share/bash-completion/completions/fathoms
echo 'eval "$(fathoms completion zsh)"' >> ~/.zshrc
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
  if [[ -z $values && $current != -* && COMP_CWORD -eq 2 ]]; then
    case $command in
@FIRST_ARGUMENTS@
    esac
  fi
  if [[ -n $values ]]; then COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [[ $current == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$current"))
  else COMPREPLY=(); fi
}
complete -o default -F _fathoms fathoms
"""
# zsh runs the function above through its own emulation of bash's completion, which has no compopt: that file names
# follow where nothing else does is said by `-o default`, which both know.
# Its `complete` needs compdef, which compinit defines; a shell that has not run it does so here.
_ZSH = """
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }
autoload -Uz bashcompinit && bashcompinit
"""

FAMILIES = (
    *("norm", "attn_placement", "mlp_placement", "residual", "stem", "stem_norm"),
    *("attention", "attn_gate", "position", "readout", "mlp"),
)
"""Families of `fathoms parts`, named here since their registries import torch."""


@dataclass(frozen=True)
class Args:
    """Options of `fathoms completion`."""

    shell: tyro.conf.Positional[Literal["bash", "zsh"]]
    """The shell."""


def run(args: Args) -> int:
    """Print the script."""
    print(script(args.shell))
    return 0


def script(shell: str = "bash") -> str:
    """The completion function of bash, with every command of today; for zsh, with what makes it understood there."""
    from fathoms.cli.main import COMMANDS, module_of

    flags: list[str] = []
    values: dict[str, list[str]] = {}
    named = _named()
    for name in COMMANDS:
        options = dict(_options(module_of(name).Args))
        flags.append(f"    {shlex.quote(name)}) flags={shlex.quote(' '.join([*options, '--help']))} ;;")
        for flag, listed in options.items():
            if choices := listed or named.get(flag, []):
                values.setdefault(" ".join(choices), []).append(shlex.quote(f"{name} {flag}"))
    first = dict.fromkeys(name.split()[0] for name in COMMANDS)
    second = (name.split()[1] for name in COMMANDS if " " in name)
    filled = _BASH.replace("@FIRST@", " ".join(first)).replace("@DATA@", " ".join(second))
    parts = {
        "@FLAGS@": flags,
        "@VALUES@": [
            f"    {'|'.join(places)}) values={shlex.quote(words)} ;;" for words, places in values.items()
        ],
        "@FIRST_ARGUMENTS@": [
            f"      {name}) values={shlex.quote(' '.join(words))} ;;"
            for name, words in _first_arguments().items()
        ],
    }
    for mark, lines in parts.items():
        filled = filled.replace(mark, "\n".join(lines))
    return ((_ZSH if shell == "zsh" else "") + filled).strip()


def _named() -> dict[str, list[str]]:
    """Flags whose values are names that are known without torch; paths are completed where none of them fits."""
    from fathoms.compare.plan import PRESETS
    from fathoms.models.zoo import list_models
    from fathoms.train.recipe.files import recipe_names

    return {
        "--model": list_models(),
        "--recipe": recipe_names(),
        "--preset": list(PRESETS),
        "--device": ["auto", "cpu", "cuda"],
    }


def _first_arguments() -> dict[str, list[str]]:
    """The first argument of commands that take a name there, by a pattern of the shell."""
    named = _named()
    return {
        "models|bench|probe|cost": named["--model"],
        "recipes": named["--recipe"],
        "parts": list(FAMILIES),
        "completion": ["bash", "zsh"],
    }


def _options(cls: type) -> Iterator[tuple[str, list[str]]]:
    """Each flag of a dataclass of arguments with the values it can take, where they are a list."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        kind, extras = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        if dataclasses.is_dataclass(kind):
            yield from _options(typing.cast(type, kind))
        elif tyro.conf.Positional not in extras:
            flag = flag_of(name)
            # As the parser takes them: what is on can only be switched off, and what a recipe sets, both.
            if kind is not bool or not defaults[name]:
                yield flag, _choices(kind)
            if (kind is bool and defaults[name]) or set(typing.get_args(kind)) == {bool, type(None)}:
                yield f"--no-{flag.removeprefix('--')}", []


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, also inside of Optional."""
    if typing.get_origin(kind) is Literal:
        return [str(value) for value in typing.get_args(kind)]
    return [choice for option in typing.get_args(kind) for choice in _choices(option)]
