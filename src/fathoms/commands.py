"""The commands compare, probe and cost as functions: settings are spelled as words, and the commands read them.

What a comparison was asked for is therefore in its plan.json as words, and the command line can go on with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import sys
import typing
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.cli import compare as compare_command
from fathoms.cli import cost as cost_command
from fathoms.cli import probe as probe_command
from fathoms.cli.flags.parse import names_of, parse
from fathoms.cli.targets import DEFAULT
from fathoms.comparing.in_process import Make, Modules
from fathoms.comparing.results import MAX_FILE, as_table, load_results
from fathoms.comparing.verdicts import Verdict, winner
from fathoms.data.sources.splits import roles_in_memory
from fathoms.errors import ConfigError, flag_of, flag_words
from fathoms.evaluating.load import LoadedModel
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.files import write_atomic
from fathoms.machine import running
from fathoms.models.config import FIELDS
from fathoms.models.vit import ViT
from fathoms.parts.modes import in_inference
from fathoms.probes.measure import logits_of
from fathoms.probes.signal import Signal
from fathoms.probes.signal import probe as measure_signal
from fathoms.registry import check_name
from fathoms.text_table import as_html
from fathoms.untrusted import read_json
from fathoms.verbs import INTERRUPTED, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def command_of(module: Any, name: str, settings: Mapping[str, Any]) -> list[str]:
    """The words of a command for settings named as its flags are; an unknown one is an error with the nearest."""
    known = [flag[2:].replace("-", "_") for flag in names_of(module.Args)[0]]
    # A flag without a value, such as --paired, is left out to be off.
    plain = [key for key, kind in typing.get_type_hints(module.Args).items() if kind is bool]
    words: list[str] = []
    for key, value in settings.items():
        check_name(key, known, "setting", name)
        if (value is None and key in {each.name for each in dataclasses.fields(module.Args)}) or (
            key in plain and value is False
        ):
            continue
        one = not isinstance(value, bool | tuple | list)
        words += ["=".join(flag_words(key, value))] if one else flag_words(key, value)
    return words


def _value(value: Any, where: str) -> str:
    text = "none" if value is None else str(value)
    if "," in text:
        raise ConfigError(f"{where}: {text!r} has a comma in it; write a plan file, and give plan=FILE")
    return text


def _grid(table: Mapping[str, Sequence[Any]], flag: str) -> list[str]:
    """Axes, or values to tune, as the command takes them."""
    words: list[str] = []
    for name, values in table.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ConfigError(f"{flag[2:]}: {name} has {values!r}; give a list of values")
        words.append(f"{flag}={name}={','.join(_value(value, f'{flag} {name}') for value in values)}")
    return words


def _arms(arms: Mapping[str, Any]) -> tuple[list[str], dict[str, Make]]:
    """Named arms as the command takes them, and what makes the modules of those that are no name."""
    words: list[str] = []
    makers: dict[str, Make] = {}
    for key, given in arms.items():
        # As the command reads it.
        name = str(key).strip()
        settings = dict(given) if isinstance(given, Mapping) else {"model": given}
        model = settings.get("model")
        if isinstance(model, nn.Module):
            raise ConfigError(
                f"arm {name!r}: a module is trained once; give what makes it, such as its class or a lambda"
            )
        if callable(model):
            makers[name] = settings.pop("model")
        texts = [f"{key}={_value(value, f'arm {name!r}')}" for key, value in settings.items()]
        words.append(f"--arm={name}: {','.join(texts)}")
    return words, makers


def _path_of(data: Any, output: str) -> str | None:
    """The path of data, which are written to an .npz where they are in memory: workers and later commands read it."""
    if data is None or isinstance(data, str | Path):
        return None if data is None else str(data)
    roles = roles_in_memory(data, 0.0)
    named = {"train": roles.train, "test": roles.test}
    if isinstance(data, Mapping) and "val" in data:
        named = {**named, "val": roles_in_memory(data).val}
    if isinstance(data, Mapping):
        named = {name: source for name, source in named.items() if name in data}
    arrays: dict[str, Any] = {"classes": np.array(roles.train.classes)}
    for name, source in named.items():
        if source is not None:
            arrays |= {f"x_{name}": getattr(source, "images"), f"y_{name}": source.labels}  # noqa: B009
    digest = hashlib.sha256("".join(s.fingerprint() for s in named.values() if s is not None).encode())
    path = Path(output) / f"arrays-{digest.hexdigest()[:12]}.npz"
    if not path.is_file():
        packed = io.BytesIO()
        np.savez(packed, **arrays)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, packed.getvalue())
    return str(path)


class Comparison:
    """A folder that `compare` or the command wrote: its table, verdicts, best arm, plot and page.

    >>> found = Comparison("results/compare/stem_patch8")
    >>> found.best is None, len(found.verdicts), found.rows[0]["stem_norm"]
    (True, 4, 'none')
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "results.json").is_file():
            raise ConfigError(
                f"{path}: holds no results of a comparison; give a folder that has results.json"
            )

    @property
    def results(self) -> dict[str, Any]:
        """results.json: arms, cells, verdicts and the answer."""
        return read_json(self.path / "results.json", ConfigError, MAX_FILE)

    @property
    def answer(self) -> str:
        """Who wins, or that nobody does, in a sentence."""
        return str(self.results["answer"])

    @property
    def verdicts(self) -> list[Verdict]:
        """One for each pair; a number that is not defined is NaN."""
        return [Verdict.from_json(row) for row in self.results["verdicts"]]

    @property
    def best(self) -> str | None:
        """The arm that is better than every other; None where none is."""
        return winner([arm["name"] for arm in self.results["arms"]], self.verdicts)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The runs as plain rows, for pandas."""
        return load_results(self.path)

    def table(self) -> str:
        """The answer, the arms and the pairs, as the command prints them."""
        return as_table(self.results)

    def plot(self) -> Figure | None:
        """Scores of every seed with the mean and its interval; None before a score."""
        from fathoms.report.arm_views import arms_of
        from fathoms.report.figures import scores_figure
        from fathoms.report.records import read_comparison

        record = read_comparison(self.path)
        return scores_figure(arms_of(record), record)

    def page(self) -> Path:
        """Write the page and the figures, and return its path."""
        from fathoms.report.page import write_report

        return write_report(self.path)

    def __repr__(self) -> str:
        return f"Comparison({str(self.path)!r}: {self.answer})"

    def _repr_html_(self) -> str:
        return as_html(self.answer, self.table().partition("\n\n")[2])


def compare(
    data: Any = None,
    axes: Mapping[str, Sequence[Any]] | None = None,
    arms: Mapping[str, Any] | None = None,
    *,
    seeds: Integral | int | Sequence[int] | None = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    show: bool = True,
    **settings: Any,
) -> Comparison:
    """Train variants over seeds and say which differences hold: what `fathoms compare` does, with the same names.

    Called again it continues, with more seeds or values it extends, and so does the command.

    Args:
        data: A path, as for the command; None for the built-in digits; or images and labels, a data set, or a dict of
            such by split, which are written to an .npz file in the output folder.
        axes: Values of each option; every combination is an arm.
        arms: Settings of each named arm. In the place of settings, or as their `model`, may stand what makes a module:
            a class or a function without arguments, which is called once for each seed, with torch seeded. Such
            comparisons run in this process and continue from Python only.
        seeds: Seeds of each arm, or the numbers of seeds at which it is looked at.
        tune: Values that are tried for each arm first.
        show: Whether lines are printed.
        **settings: The flags of the command with underscores: `baseline`, `metric`, `lr`, `epochs`, `depth`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = {"epochs": 1, "warmup_epochs": 0, "depth": 1, "dim": 16, "output": folder}
    ...     found = compare(axes={"norm": ["layernorm", "dyt"]}, seeds=1, show=False, **small)
    ...     len(found.rows)
    2
    """
    path = _path_of(data, str(settings.get("output", "runs")))
    named, makers = _arms(arms or {})
    if seeds is not None:
        if not isinstance(seeds, Integral | Sequence):
            raise ConfigError(f"seeds={seeds!r}: give a whole number, or a list of them")
        settings["seeds"] = ",".join(map(str, seeds)) if isinstance(seeds, Sequence) else int(seeds)
    words = [*([] if path is None else [path]), *_grid(axes or {}, "--axis"), *named]
    words += [*_grid(tune or {}, "--tune"), *command_of(compare_command, "compare", settings)]
    args = parse(compare_command, "compare", words)
    if args.dry_run or args.scores is not None or args.json:
        flag = next(name for name in ("dry_run", "scores", "json") if getattr(args, name))
        raise ConfigError(f"{flag_of(flag)}: is for the command line; for scores there is fathoms.judge")
    with running(["compare", *words]):
        comparison = compare_command.make_comparison(args, Modules(makers) if makers else None)
        comparison.check()
        _, code = comparison.run(print if show else lambda _: None)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    found = Comparison(comparison.folder.path)
    found.page()
    if show and code:
        print("runs are left or failed: the same call continues", file=sys.stderr)
    return found


def _given(module: nn.Module, image_size: int | None) -> LoadedModel:
    """A module of Python code, as the commands take a loaded model."""
    if isinstance(module, ViT):
        shape = (module.config.image_size, module.config.in_channels, module.config.num_classes)
    elif image_size is None:
        raise ConfigError("image_size: give the side of the images that your module takes")
    else:
        weight = next((p for p in module.parameters() if p.ndim == 4), None)
        channels = 3 if weight is None else weight.shape[1]
        with in_inference(module), torch.no_grad():
            home = next(module.parameters()).device
            outputs = logits_of(module(torch.zeros(1, channels, image_size, image_size, device=home)))
        shape = (image_size, channels, outputs.shape[-1])
    name, config = type(module).__name__, module.config if isinstance(module, ViT) else None
    seen = Preprocessing.of({}).at(shape[0])
    return LoadedModel(module, name, config, *shape, seen, None, {}, {}, None, name, None, trained=False)


def _target_of(
    command: Any, name: str, model: Any, settings: dict[str, Any]
) -> tuple[Any, LoadedModel | None]:
    """The arguments of a command that looks at a model, and the model where it is a module."""
    target = None
    if isinstance(model, nn.Module):
        target = _given(model, settings.pop("image_size", None))
    elif isinstance(model, Run) and model.own is not None:
        target = model.loaded
    if target is not None:
        for key in settings:
            if key in FIELDS:
                raise ConfigError(f"{flag_of(key)}: a module has no such switch; leave it out")
    named = model is not None and not isinstance(model, nn.Module)
    place = [str(model.path if isinstance(model, Run) else model)] if named else []
    words = [*place, *([str(settings.pop("data"))] if "data" in settings else [])]
    if len(words) > len(place) and not place:
        words.insert(0, DEFAULT)
    return parse(command, name, [*words, *command_of(command, name, settings)]), target


def probe(
    model: nn.Module | Run | str | Path | None = None,
    images: Float[Tensor, "B C H W"] | None = None,
    labels: Int[Tensor, " B"] | None = None,
    *,
    optimizer: Optimizer | None = None,
    light: bool = False,
    **settings: Any,
) -> Signal:
    """Measure signal and gradient at every residual connection of a model, and judge its start or its drift.

    With `images` it measures that batch alone, and describes the initialisation. Without, it does what `fathoms probe`
    does: images of `data` or of the built-in digits, and for an untrained model ten optimizer steps on a copy, by which
    `verdict()` judges. The model is left as it is.

    Args:
        model: A module, of fathoms, timm, torchvision, transformers or your own; or, as for the command, a name with
            any switches, "timm/NAME", a run, or the path of one.
        images: A batch (B, C, H, W).
        labels: Its classes; None draws them at random with a fixed seed.
        optimizer: The optimizer that trains the module, for the update-to-weight ratio.
        light: Leave out the statistics of attention, the costliest.
        **settings: The flags of the command with underscores: `data`, `batch_size`, `steps`, `lr`, `opt`, `seed`, and
            `image_size` of a module of your own.

    >>> signal = probe("vit_digits", depth=2, steps=2)
    >>> [site.branch for site in signal[:2]], signal.verdict().outcome
    (['attn', 'mlp'], 'not judged')
    """
    if images is not None:
        if not isinstance(model, nn.Module) or settings:
            raise ConfigError("probe: a batch of images goes with a module alone; leave one of them out")
        return measure_signal(model, images, labels, optimizer=optimizer, light=light)
    if labels is not None or optimizer is not None or light:
        raise ConfigError("probe: labels, optimizer and light go with images; give those too")
    args, target = _target_of(probe_command, "probe", model, settings)
    only = ("depths", "axis", "coordinates", "full", "figures", "overwrite", "json")
    if used := next((name for name in only if getattr(args, name)), None):
        raise ConfigError(
            f"{flag_of(used)}: is for the command line; a Signal has .table(), .plot() and .verdict()"
        )
    probe_command.check(args)
    return probe_command.measured(args, target)[2]


@dataclasses.dataclass(frozen=True, repr=False)
class Costs:
    """What a model costs by part, as `cost` measures it; `found` has every number.

    >>> print(cost("vit_digits", depth=2, device="cpu").table().partition(";")[0])
    vit_digits: 0.10 M parameters, 0.00175 G multiplications an image
    """

    found: dict[str, Any]

    def table(self) -> str:
        """The tables that the command prints."""
        return "\n".join(cost_command.describe(self.found))

    def plot(self) -> Figure:
        """The share of each part in parameters, multiplications, saved activations and time."""
        from fathoms.probes.probe_figures import cost_figure

        return cost_figure(self.found["parts"], f"{self.found['model']}, by part")

    def __repr__(self) -> str:
        return f"Costs({self.table().partition(chr(10))[0]})"

    def _repr_html_(self) -> str:
        head, _, rest = self.table().partition("\n\n")
        return as_html(head, rest)


def cost(model: nn.Module | Run | str | Path | None = None, **settings: Any) -> Costs:
    """Parameters, multiplications, memory and time of a model by part: what `fathoms cost` does, with the same names.

    Args:
        model: A module; or, as for the command, a name with any switches, "timm/NAME", a run, or the path of one.
        **settings: The flags of the command with underscores: `batch_size`, `recipe`, `images`, `device`, and
            `image_size` of a module of your own.

    >>> found = cost("vit_digits", depth=2, device="cpu")
    >>> found.found["parameters"], list(found.found["parts"])
    (102218, ['stem', 'attention', 'mlp', 'rest'])
    """
    args, target = _target_of(cost_command, "cost", model, settings)
    return Costs(cost_command.measure(args, target))
