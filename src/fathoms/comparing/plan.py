"""The plan of a comparison: arms and seeds, from axes on the command line or a TOML file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fathoms.errors import ConfigError
from fathoms.registry import check_name
from fathoms.text_table import plural
from fathoms.untrusted import has_control

VERSION = 1
KEYS = ("version", "seeds", "keep_arms", "axes", "arms", "tune", "tune_epochs")
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
TIMED = "seconds-to"
"""The metric of seconds until an accuracy, as in seconds-to=90."""


@dataclass(frozen=True)
class Variant:
    """One variant: its name, and its settings as option name and text."""

    name: str
    settings: tuple[tuple[str, str], ...]

    def table(self) -> dict[str, str]:
        return dict(self.settings)


@dataclass(frozen=True)
class Plan:
    """Arms × seeds.

    Args:
        axes: Option names and their values; every combination is an arm.
        arms: Named settings that go together; an axis of their own.
        seeds: Seeds of each arm, counted from 0.
        looks: Numbers of seeds at which the comparison is looked at, the last of them all; none without planned looks.
        keep: Arms that go on, and after how many seeds; None drops none.
        tune: Option names and values that are tried for each arm before its seeds.
        tune_epochs: Epochs of such a trial; None for those of a run.
        file: The file that says all this, which errors name instead of flags; None where flags say it.
    """

    axes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    arms: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    seeds: int = 5
    looks: tuple[int, ...] = ()
    keep: tuple[int, int] | None = None
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
        looks = tuple(seeds) if isinstance(seeds, list) else ()
        for key, values in (("seeds", looks or [seeds]), ("tune_epochs", [tune_epochs])):
            for value in values:
                if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                    raise ConfigError(f"{where}: {key} is a whole number; {value!r} is not")
        if looks:
            seeds = parse_seeds(",".join(map(str, looks)), f"{where}: seeds")[-1]
        keep = table.get("keep_arms")
        return cls(
            axes={name: _texts(values, f"{where}: {name}") for name, values in axes.items()},
            arms={name: _settings(settings, f"{where}: {name}") for name, settings in arms.items()},
            seeds=seeds,
            looks=looks if len(looks) > 1 else (),
            keep=parse_keep(None if keep is None else str(keep), looks or (seeds,)),
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
    named += [(f"{plan.spelled('tune')} {name!r}", name) for name in plan.tune]
    named += [(f"{arms} {name!r}: {o!r}", o) for name, settings in plan.arms.items() for o in settings]
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


Arms = Mapping[str, Mapping[str, str]]
"""The settings of each arm, by its name."""


def pairs_of(arms: Arms, baseline: str | None) -> list[tuple[str, str]]:
    """All pairs; or each arm with the baseline; or, where that is one value of an axis, with its own counterpart.

    >>> norms = {f"norm={n}, depth={d}": {"norm": n, "depth": d} for n in ("dyt", "layernorm") for d in ("12", "36")}
    >>> pairs_of(norms, "norm=layernorm")[0]
    ('norm=dyt, depth=12', 'norm=layernorm, depth=12')
    """
    if baseline is None:
        return list(itertools.combinations(arms, 2))
    found = counterparts(arms, baseline)
    return [(name, other) for name, other in found.items() if other is not None]


def counterparts(arms: Arms, baseline: str) -> dict[str, str | None]:
    """For each arm the one that it is compared with; None where there is none. The baseline's arms are left out."""
    if baseline in arms:
        return {name: baseline for name in arms if name != baseline}
    parts = {name: parts_of(name, settings) for name, settings in arms.items()}
    at = {own: name for name, own in parts.items() if baseline in own}
    return {name: _counterpart(own, at, baseline) for name, own in parts.items() if name not in at.values()}


def parts_of(name: str, settings: Mapping[str, str]) -> tuple[str, ...]:
    """The name of an arm in its parts: its own name, which may hold commas, and a value of each axis.

    >>> parts_of("scaler, ones, depth=12", {"norm": "learnable_scaler", "norm_init": "ones", "depth": "12"})
    ('scaler, ones', 'depth=12')
    """
    parts: list[str] = []
    for option, value in reversed(list(settings.items())):
        if not name.endswith(f"{JOINT}{option}={value}"):
            break
        parts.insert(0, f"{option}={value}")
        name = name.removesuffix(JOINT + parts[0])
    return (name, *parts)


def _counterpart(parts: tuple[str, ...], at: Mapping[tuple[str, ...], str], baseline: str) -> str | None:
    """The arm with the baseline in the place of one part."""
    for place in range(len(parts)):
        if found := at.get((*parts[:place], baseline, *parts[place + 1 :])):
            return found
    return None


def check_baseline(baseline: str, arms: Arms) -> None:
    """Refuse a baseline that is neither an arm nor a value that every other arm can be compared with."""
    parts = dict.fromkeys(part for name, settings in arms.items() for part in parts_of(name, settings))
    check_name(baseline, dict.fromkeys([*arms, *parts]), "arm or value", "--baseline")
    alone = [name for name, other in counterparts(arms, baseline).items() if other is None]
    if alone:
        raise ConfigError(
            f"--baseline {baseline!r}: no arm differs from {alone[0]!r} only in it; name an arm, or leave it out"
        )


def still_there(plan: Plan, earlier: Mapping[str, Any]) -> list[str]:
    """Lines on arms and values of earlier commands that this one leaves out, and that stay."""
    ours = {arm.name for arm in plan.variants()}
    left = [repr(name) for name in earlier.get("arms", {}) if ours and name not in ours]
    lines = [f"arms of earlier commands stay: {', '.join(left)}"] if left else []
    values = [name for name in earlier.get("tune", {}) if name not in plan.tune]
    if values:
        lines.append(f"values of earlier commands are still tried for each arm: {', '.join(values)}")
    return [f"{line}; another --experiment does without them" for line in lines]


def parse_seeds(text: str, flag: str = "--seeds") -> tuple[int, ...]:
    """Seeds as a user writes them: one number, or the numbers at which the comparison is looked at.

    >>> parse_seeds("3,5,10")
    (3, 5, 10)
    """
    try:
        looks = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: write a number, or rising ones such as 3,5,10") from None
    if min(looks) < 1 or list(looks) != sorted(set(looks)):
        raise ConfigError(f"{flag} {text}: use 1 or more, rising, such as 5 or 3,5,10")
    if len(looks) > 1 and looks[0] < 3:
        raise ConfigError(f"{flag} {text}: a look needs 3 seeds or more")
    return looks


def parse_keep(text: str | None, looks: Sequence[int]) -> tuple[int, int] | None:
    """`3@5`: after five seeds go on with the best three arms.

    >>> parse_keep("3@5", (10,))
    (3, 5)
    """
    if text is None:
        return None
    arms, at, seeds = text.partition("@")
    if not (at and arms.isdigit() and seeds.isdigit() and int(arms) and int(seeds)):
        raise ConfigError(f"--keep-arms {text!r}: write ARMS@SEEDS, such as 3@3")
    if int(seeds) >= looks[-1]:
        raise ConfigError(f"--keep-arms {text}: would drop nothing; use fewer than the {looks[-1]} seeds")
    return int(arms), int(seeds)


def target_of(metric: str) -> float | None:
    """The accuracy in percent to which runs are timed; None for another metric.

    >>> target_of("seconds-to=90")
    90.0
    """
    name, given, value = metric.partition("=")
    return float(value) if name == TIMED and given else None
