"""The plan of a comparison: arms and seeds, from axes on the command line or a TOML file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fathoms.errors import ConfigError
from fathoms.files.untrusted import has_control
from fathoms.names.registry import check_name
from fathoms.text_table import plural

VERSION = 1
KEYS = ("version", "seeds", "axes", "arms", "tune", "tune_epochs")
"""Keys of a plan; a plan file has `train` and `baseline` beside them."""
JOINT = ", "
"""Between the parts in the name of an arm of several axes."""
MAX_CELLS = 10_000
FLAGS = {
    "axes": "--axis",
    "arms": "--arm",
    "tune": "--tune",
    "seeds": "--seeds",
    "tune_epochs": "--tune-epochs",
}
"""The parts of a plan, by their keys in a file, and the flags that give them."""
TABLES = ("axes", "arms", "tune")
PRESETS: dict[str, dict[str, Any]] = {
    "norms": {"axes": {"norm": ["layernorm", "rmsnorm", "learnable_scaler", "dyt", "derf"]}},
    "scaler": {
        "arms": {
            "layernorm": {"norm": "layernorm"},
            "scaler, normal start": {"norm": "learnable_scaler", "norm_init": "normal"},
            "scaler, ones": {"norm": "learnable_scaler", "norm_init": "ones"},
        },
        "tune": {"lr": ["1e-4", "3e-4", "1e-3", "3e-3"]},
    },
    "residual": {
        "axes": {
            "residual": ["none", "layerscale", "rezero", "skipinit", "fixup", "tfixup"],
            "depth": ["12", "24"],
        }
    },
    "placements": {
        "axes": {
            "attn_placement": ["pre", "post", "pre_post"],
            "mlp_placement": ["pre", "post", "pre_post"],
        }
    },
    "stem": {"axes": {"stem_norm": ["none", "pre", "post", "dual", "post_pos"]}},
    "cait": {
        "arms": {
            "cls": {"readout": "cls"},
            "class attention 1": {"readout": "class_attention", "class_attention_depth": "1"},
            "class attention 2": {"readout": "class_attention", "class_attention_depth": "2"},
            "class attention 3": {"readout": "class_attention", "class_attention_depth": "3"},
            "talking heads": {
                "readout": "class_attention",
                "class_attention_depth": "2",
                "attention": "talking_heads",
            },
        }
    },
    "optimizers": {"axes": {"opt": ["adamw", "lamb", "muon"]}},
}
"""Comparisons that the field argues about, ready to run."""


@dataclass(frozen=True)
class Variant:
    """One variant: its name, and its settings as option name and text."""

    name: str
    settings: tuple[tuple[str, str], ...]

    def table(self) -> dict[str, str]:
        """The settings by name."""
        return dict(self.settings)


@dataclass(frozen=True)
class Plan:
    """Arms × seeds.

    Args:
        axes: Option names and their values; every combination is an arm.
        arms: Named settings that go together; an axis of their own.
        seeds: Seeds of each arm, counted from 0.
        tune: Option names and values that are tried for each arm before its seeds.
        tune_epochs: Epochs of such a trial; None for those of a run.
        file: The file that says all this, which errors name instead of flags; None where flags say it.
    """

    axes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    arms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seeds: int = 5
    tune: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tune_epochs: int | None = None
    file: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise ConfigError(f"{self.spelled('seeds')} {self.seeds}: use 1 or more")
        _refuse_odd_names(self)
        _refuse_clashes(self)
        if self.tune_epochs is not None and (self.tune_epochs < 1 or not self.tune):
            wrong = (
                "use 1 or more" if self.tune else f"would not be used; it needs {self.spelled('tune', '')}"
            )
            raise ConfigError(f"{self.spelled('tune_epochs')} {self.tune_epochs}: {wrong}")
        for key, table, least in (("axes", self.axes, 1), ("tune", self.tune, 2)):
            for name, values in table.items():
                _check_values(f"{self.spelled(key)} {name}", values, least)
        cells = len(self.variants()) * self.seeds
        if cells > MAX_CELLS:
            raise ConfigError(
                f"{self.spelled('seeds')} {self.seeds}: {cells} runs are too many; {MAX_CELLS} are the most"
            )

    def spelled(self, key: str, file: str | None = None) -> str:
        """A part of the plan as its author wrote it: a flag, or a table or key of the file."""
        if self.file is None:
            return FLAGS[key]
        where = f"{self.file}: " if file is None else file
        return f"{where}[{key}]" if key in TABLES else f"{where}{key} ="

    def variants(self) -> list[Variant]:
        """Every arm, in the order of the axes."""
        lists: list[list[tuple[str, tuple[tuple[str, str], ...]]]] = []
        if self.arms:
            lists.append([(name, tuple(settings.items())) for name, settings in self.arms.items()])
        for axis, values in self.axes.items():
            lists.append([(f"{axis}={value}", ((axis, value),)) for value in values])
        return [
            Variant(
                JOINT.join(name for name, _ in choice), tuple(itertools.chain(*(made for _, made in choice)))
            )
            for choice in itertools.product(*lists)
        ]

    def to_dict(self) -> dict[str, Any]:
        """As a plan file holds it."""
        return {
            "version": VERSION,
            "seeds": self.seeds,
            "axes": {name: list(values) for name, values in self.axes.items()},
            "arms": {name: dict(settings) for name, settings in self.arms.items()},
            "tune": {name: list(values) for name, values in self.tune.items()},
            "tune_epochs": self.tune_epochs,
        }

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], where: str) -> Plan:
        """A plan out of a file; an unknown key is an error that names the nearest one."""
        for key in table:
            check_name(key, KEYS, "key", where)
        if table.get("version", VERSION) != VERSION:
            raise ConfigError(f"{where}: its version is {table['version']!r}; this package reads {VERSION}")
        axes, arms, tune = (table.get(key, {}) for key in ("axes", "arms", "tune"))
        for key, value in (("axes", axes), ("arms", arms), ("tune", tune)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: [{key}] is a table; write it as one")
        seeds, tune_epochs = table.get("seeds", 5), table.get("tune_epochs")
        for key, value in (("seeds", seeds), ("tune_epochs", tune_epochs)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise ConfigError(f"{where}: {key} is a whole number; {value!r} is not")
        return cls(
            axes={name: _texts(values, f"{where}: {name}") for name, values in axes.items()},
            arms={name: _settings(settings, f"{where}: {name}") for name, settings in arms.items()},
            seeds=seeds,
            tune={name: _texts(values, f"{where}: {name}") for name, values in tune.items()},
            tune_epochs=tune_epochs,
            file=where,
        )


def _refuse_odd_names(plan: Plan) -> None:
    """Refuse names that would break the tables, or cannot be written into a file."""
    arms = plan.spelled("arms")
    if any(not name.strip() for name in plan.arms):
        raise ConfigError(f"{arms} '': an arm has no name; give it one")
    named = [(f"{arms} {name!r}", name) for name in plan.arms]
    named += [
        (f"{plan.spelled(key)} {name}={value!r}", value)
        for key, table in (("axes", plan.axes), ("tune", plan.tune))
        for name, values in table.items()
        for value in values
    ]
    named += [
        (f"{arms} {name!r}: {option}={value!r}", value)
        for name, settings in plan.arms.items()
        for option, value in settings.items()
    ]
    for where, text in named:
        if has_control(text):
            raise ConfigError(
                f"{where}: has control characters or bytes that are not text; write it without them"
            )


def _refuse_clashes(plan: Plan) -> None:
    """Refuse an option that is set in two places."""
    tied = {name: arm for arm, settings in plan.arms.items() for name in settings}
    for name in plan.axes:
        if name in tied:
            where = f"{plan.spelled('arms')} {tied[name]!r}"
            raise ConfigError(f"{where}: {name} is an axis already; leave one of the two out")
    for name in plan.tune:
        if name in plan.axes or name in tied:
            where = f"{plan.spelled('tune')} {name}"
            raise ConfigError(f"{where}: it is an axis already; tune it or compare it")
    if plan.tune_epochs is not None and ("epochs" in plan.axes or "epochs" in tied or "epochs" in plan.tune):
        where = f"{plan.spelled('tune_epochs')} {plan.tune_epochs}"
        raise ConfigError(f"{where}: epochs differ between arms; leave one of the two out")


def _check_values(where: str, values: Sequence[str], least: int) -> None:
    if len(values) < least:
        raise ConfigError(f"{where}: give at least {plural(least, 'value')}")
    double = next((value for value in values if list(values).count(value) > 1), None)
    if double is not None:
        raise ConfigError(f"{where}: {double!r} is there twice; leave one out")


def _texts(values: Any, where: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(v, str | int | float) for v in values):
        raise ConfigError(f"{where}: give a list of values")
    return [str(value) for value in values]


def _settings(table: Any, where: str) -> dict[str, str]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: give a table of options and values")
    for name, value in table.items():
        if not isinstance(value, str | int | float):
            raise ConfigError(f"{where}: {name}: give one text or number; {value!r} is not")
    return {str(name): str(value) for name, value in table.items()}


_NAME = re.compile(r"[a-zA-Z][\w-]*")


def parse_axis(text: str, flag: str = "--axis") -> tuple[str, list[str]]:
    """One axis as a user writes it.

    >>> parse_axis("norm=layernorm,dyt")
    ('norm', ['layernorm', 'dyt'])
    """
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    listed = [value.strip() for value in values.split(",")]
    if not equals or not _NAME.fullmatch(name) or not all(listed):
        raise ConfigError(f"{flag} {text!r}: write NAME=VALUE,VALUE, such as norm=layernorm,dyt")
    return name, listed


def parse_axes(texts: Iterable[str], flag: str = "--axis") -> dict[str, list[str]]:
    """All axes by name; the same one twice is an error."""
    axes: dict[str, list[str]] = {}
    for text in texts:
        name, values = parse_axis(text, flag)
        if name in axes:
            raise ConfigError(f"{flag} {name}: given twice; put all its values into one")
        axes[name] = values
    return axes


def parse_arms(texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """Arms as users write them.

    >>> parse_arms(["ones: norm=learnable_scaler,norm_init=ones"])
    {'ones': {'norm': 'learnable_scaler', 'norm_init': 'ones'}}
    """
    arms: dict[str, dict[str, str]] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        pieces = [piece.partition("=") for piece in rest.split(",")] if rest.strip() else []
        settings = {
            key.strip().removeprefix("--").replace("-", "_"): value.strip() for key, _, value in pieces
        }
        if not colon or not name.strip() or not all(key and value for key, value in settings.items()):
            raise ConfigError(
                f"--arm {text!r}: write NAME: OPTION=VALUE,OPTION=VALUE; "
                "a value with a comma in it goes into --plan FILE"
            )
        if len(settings) < len(pieces):
            raise ConfigError(f"--arm {name.strip()!r}: gives an option twice; leave one out")
        if name.strip() in arms:
            raise ConfigError(f"--arm {name.strip()!r}: given twice; use another name")
        arms[name.strip()] = settings
    return arms
