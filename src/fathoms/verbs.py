"""The commands as functions, for notebooks and scripts: `fathoms.train(...)` is what `fathoms train` runs."""

from __future__ import annotations

import copy
import dataclasses
import signal
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fathoms.config_checks import as_declared
from fathoms.data.readiness import median_side
from fathoms.data.sources.arrays import as_source, is_numbered
from fathoms.data.sources.splits import Roles, open_held_out, roles_in_memory
from fathoms.errors import ConfigError
from fathoms.evaluating.held_out import measure
from fathoms.evaluating.load import LoadedModel, load_run, weights_file
from fathoms.evaluating.predict import class_names, list_images
from fathoms.evaluating.predict import predict as classify
from fathoms.evaluating.preprocessing import Preprocessing
from fathoms.models.config import FIELDS, ViTConfig
from fathoms.models.training_record import of_weights, record_beside
from fathoms.models.weights import read_tensors
from fathoms.registry import check_name
from fathoms.text_table import as_html
from fathoms.training.build import module_hash
from fathoms.training.defaults import named_run, starting_table
from fathoms.training.distributed import (
    CODES,
    choose_device,
    gather_objects,
    join_world,
    leave_world,
    naming_lost_ranks,
)
from fathoms.training.job import GivenModule, Job, RunOptions, job_of
from fathoms.training.recipe import RECIPE_FIELDS, Recipe
from fathoms.training.run import Trainer
from fathoms.training.run_folder import Outcome
from fathoms.untrusted import read_json, read_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fathoms.evaluating.metrics import Evaluation
    from fathoms.evaluating.predict import Prediction
    from fathoms.exporting.verified_export import Exported

IN_MEMORY = "arrays_in_memory"
"""The data of a run that was given arrays, in its name and its record."""
INTERRUPTED, AVERAGED = CODES[signal.SIGINT], "ema.safetensors"
RUN_OPTIONS = tuple(each.name for each in dataclasses.fields(RunOptions))


class Run:
    """A run folder, as `train` leaves it.

    >>> Run("runs/not_there")
    Traceback (most recent call last):
    fathoms.errors.ConfigError: runs/not_there: holds no run; give a folder that `fathoms train` wrote
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not (self.path / "config.toml").is_file():
            raise ConfigError(f"{path}: holds no run; give a folder that `fathoms train` wrote")

    @cached_property
    def loaded(self) -> LoadedModel:
        """The trained model with its preprocessing and classes, of the weights that `fathoms validate` takes.

        Of a module of your own it is `model`, as training left it.
        """
        own = self.own
        return load_run(self.path) if own is None else _of_module(own, self.path)

    @property
    def own(self) -> nn.Module | None:
        """The module of your own that was trained here; None where a name builds the model."""
        given = vars(self).get("model")
        return given if given is not None and record_beside(self.path).module is not None else None

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in evaluation mode."""
        return self.loaded.model

    @property
    def summary(self) -> dict[str, Any]:
        """Status, accuracies, seconds and memory; empty until the run has ended."""
        path = self.path / "summary.json"
        return read_json(path, ConfigError) if path.is_file() else {}

    @property
    def history(self) -> Any:
        """The rows of metrics.jsonl: a pandas DataFrame where pandas is installed, else a list of dicts."""
        rows = read_lines(self.path / "metrics.jsonl")
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def plot(self) -> Figure:
        """The curves of the run, as its page shows them."""
        from fathoms.report.records import read_run
        from fathoms.report.run_page import run_plot

        return run_plot(read_run(self.path))

    def predict(self, image: str | Path, top: int = 5) -> list[tuple[str, float]]:
        """The likeliest classes of an image file, with their probabilities."""
        (found,) = predict(self, [image], top=top)
        if found.problem:
            raise ConfigError(f"{image}: {found.problem}")
        return list(zip(found.classes, found.probabilities, strict=True))

    def _facts(self) -> list[tuple[str, str]]:
        summary = self.summary
        facts = [("status", summary.get("status", "not ended")), ("epochs", str(summary.get("epoch", "")))]
        for split, key in (("val", "last"), ("test", "test")):
            if (scored := summary.get(key)) is not None:
                facts.append((f"{split} accuracy", f"{scored['top1']:.2f} % of {scored['images']} images"))
        return facts

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {', '.join(f'{name} {value}' for name, value in self._facts())})"

    def _repr_html_(self) -> str:
        return as_html(str(self.path), "\n".join(f"{name}: {value}" for name, value in self._facts()))


def train(
    data: Any = None,
    *,
    model: str | ViTConfig | nn.Module | None = None,
    recipe: str | None = None,
    show: bool = True,
    **settings: Any,
) -> Run:
    """Train a model, or go on with a run that was stopped: what `fathoms train` does, with the same names.

    Args:
        data: A path, as for the command; None for the built-in digits; a pair of images (uint8, N x H x W or with
            channels) and labels; a data set of (image, label); or a dict of such by split: train, val, test.
        model: A name of `fathoms.list_models()`, "timm/NAME", a `ViTConfig`, or a module of your own. The last has no
            name to be built from: it resumes from Python only, with the same module.
        recipe: A name of `fathoms recipes`, or a TOML file. Without a model and a recipe, sizes suit the data and the
            machine.
        show: Whether progress is printed.
        **settings: The flags of the command with underscores: of the recipe (`lr`, `epochs`), of the run (`seed`,
            `output`), and of the model (`norm`, `depth`).

    Ctrl-C raises KeyboardInterrupt once the run is saved; the same call goes on.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = train(epochs=1, warmup_epochs=0, depth=1, dim=16, output=folder, show=False)
    ...     run.summary["status"]
    'done'
    """
    if model is not None and not isinstance(model, str | ViTConfig | nn.Module):
        raise ConfigError(f"model: {model!r} is no name, ViTConfig or module; give one of them")
    module, name = (model, type(model).__name__) if isinstance(model, nn.Module) else (None, model)
    splits = None if data is None or isinstance(data, str | Path) else data
    options, run_options, switches = _by_owner(settings)
    roles = None if splits is None else roles_in_memory(splits, options.get("val_share"))
    given = None
    if module is not None:
        size = switches.pop("image_size", None) or (None if roles is None else median_side(roles.train))
        if size is None:
            raise ConfigError("image_size: give the side of the images that your module takes")
        given = GivenModule(size, module_hash(module))
    where = IN_MEMORY if splits is not None else None if data is None else str(data)
    start, asked = RunOptions(**run_options), {**options, **switches}
    table: Mapping[str, Any] | None = None
    if where is not None and name is None and recipe is None and start.initial_checkpoint is None:
        start = named_run(where, start, asked)
        table = starting_table(where, start, asked, roles)
    job = job_of(where, name, table or recipe, options, switches, start, given)
    outcome = run_job(job, roles, module, show)
    if outcome is not None and outcome.code == INTERRUPTED:
        # All is saved. A loop of runs is meant to end, too.
        raise KeyboardInterrupt
    run = Run(job.folder)
    if module is not None:
        run.model = _averaged(module.eval(), run.path)
    return run


def _averaged(module: nn.Module, run: Path) -> nn.Module:
    """A module with the averaged weights of its run, which are what was measured; itself where none were kept."""
    weights = weights_file(run / "checkpoints" / "last")
    if weights.name != AVERAGED:
        return module
    module = copy.deepcopy(module)
    module.load_state_dict(read_tensors(weights, str(weights)))
    return module


def _by_owner(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The settings of the recipe, of the run and of the model; an unknown one is an error with the nearest name."""
    owners = ((Recipe, RECIPE_FIELDS), (RunOptions, RUN_OPTIONS), (ViTConfig, FIELDS))
    for name in settings:
        check_name(name, [each for _, own in owners for each in own], "setting", "train")
    # As a file would have them: paths as text, numbers of numpy as Python's.
    settings = {
        name: str(value)
        if isinstance(value, Path)
        else value.item()
        if isinstance(value, np.generic)
        else value
        for name, value in settings.items()
    }
    of_recipe, of_run, of_model = (
        {name: as_declared(config, name, value) for name, value in settings.items() if name in own}
        for config, own in owners
    )
    return of_recipe, of_run, of_model


def run_job(
    job: Job,
    roles: Roles | None = None,
    module: nn.Module | None = None,
    show: bool = True,
    check: Callable[[], None] = lambda: None,
    say: Callable[[dict[str, Any]], None] = lambda _: None,
    plan: Callable[[Trainer], None] | None = None,
) -> Outcome | None:
    """Train a job on the ranks that there are, and write its page; None where it is only planned.

    Args:
        job: The run.
        roles: Its data, where it is open already.
        module: Its model, where it has no name to be built from.
        show: Whether progress is printed.
        check: Called by every rank once it has joined the others, so that none waits for one that refuses.
        say: Called with the summary by rank 0, at the end.
        plan: Called by rank 0 instead of training.
    """
    world = join_world(job.run.device)
    try:
        with naming_lost_ranks(world):
            check()
            trainer = Trainer(job, world, show, roles, module)
            if plan is not None:
                if world.is_main:
                    plan(trainer)
                return None
            outcome = trainer.run()
            if world.is_main:
                from fathoms.report.page import write_report

                write_report(job.folder)
                say(outcome.summary)
            # torchrun ends all ranks when one has left after a signal: none leaves while rank 0 still writes.
            gather_objects(world, None)
    finally:
        leave_world()
    return outcome


def evaluate(
    model: Run | LoadedModel | str | Path,
    data: Any = None,
    *,
    split: str | None = None,
    batch_size: int = 128,
    device: str = "auto",
) -> Evaluation:
    """Measure a trained model on held-out images: accuracy, loss, calibration, confusion, as `fathoms validate` does.

    Args:
        model: A run, what `fathoms.load_run` gives, or the path of either.
        data: As for `train`; None is the data of the run.
        split: The split; None takes test, else val.
        batch_size: Images of a batch.
        device: auto, cpu or cuda.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = train(epochs=1, warmup_epochs=0, depth=1, dim=16, output=folder, show=False)
    ...     evaluate(run).images
    359
    """
    loaded = _loaded(model)
    where = data if data is not None else loaded.data
    if where is None or (isinstance(where, str) and where == IN_MEMORY):
        raise ConfigError("evaluate: the model's data have no path; give data")
    if isinstance(where, str | Path):
        source = open_held_out(str(where), split, loaded.run if data is None else None)
    else:
        if isinstance(where, Mapping):
            split = split or next((name for name in ("test", "val") if name in where), "test")
            check_name(split, list(where), "split", "evaluate")
            where = where[split]
        # Names of its own are matched with the model's below.
        named = getattr(where, "classes", None) is not None and not is_numbered(loaded.classes or ())
        source = as_source(where, split or "test", None if named else loaded.classes)
    return measure(loaded, source, batch_size, choose_device(device))


def predict(
    model: Run | LoadedModel | str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 5,
    classes: Sequence[str] | None = None,
) -> list[Prediction]:
    """The likeliest classes of one or several image files, or of those in folders, as `fathoms predict` gives them.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = train(epochs=1, warmup_epochs=0, depth=1, dim=16, output=folder, show=False)
    ...     Image.new("L", (8, 8)).save(f"{folder}/grey.png")
    ...     len(predict(run, [f"{folder}/grey.png"], top=3)[0].classes)
    3
    """
    loaded = _loaded(model)
    files = list_images(map(Path, [images] if isinstance(images, str | Path) else images))
    names = classes or class_names(None, loaded.classes, loaded.num_classes)
    most = min(top, len(names))
    return list(classify(loaded.model, files, classes=names, top=most, preprocessing=loaded.preprocessing))


def export(
    model: Run | LoadedModel | nn.Module | str | Path, path: str | Path, format: str = "onnx", **options: Any
) -> Exported:
    """Write a model to a file that is verified against it, with its card, as `fathoms export` does.

    Args:
        model: A run, what `fathoms.load_run` gives, the path of either, or a module.
        path: The file.
        format: onnx, torch-export, safetensors or timm.
        **options: Of `fathoms.exporting.verified_export.export_model`: folded, accelerated, opset, int8.

    >>> import tempfile
    >>> from fathoms import create_model
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(create_model("vit_digits", depth=1), f"{folder}/model.safetensors", "safetensors").format
    'safetensors'
    """
    from fathoms.exporting.card import card_entries
    from fathoms.exporting.verified_export import export_model

    known = ("accelerated", "folded", "opset", "int8", "name", "about", "graph")
    for option in options:
        check_name(option, known, "option", "export")
    if isinstance(model, nn.Module):
        return export_model(model, path, format, **options)
    loaded = _loaded(model)
    return export_model(loaded.model, path, format, name=loaded.name, about=card_entries(loaded), **options)


def _of_module(module: nn.Module, run: Path) -> LoadedModel:
    """A module of Python code that was trained in a run folder, with the record of that."""
    last = weights_file(run / "checkpoints" / "last")
    record = of_weights(record_beside(run), last)
    size, classes = record.module, record.classes or ()
    assert size is not None
    # A copy that shares the weights and says what the verbs ask of a model: modules of one's own rarely do.
    told = copy.copy(module)
    for name, value in (("in_chans", 3), ("image_size", size), ("num_classes", len(classes))):
        if not hasattr(told, name):
            setattr(told, name, value)
    seen = Preprocessing.of({**record.recipe, **record.preprocessing}).at(size)
    kept = (seen, classes, record.recipe, record.metrics, record.data, str(last), run)
    return LoadedModel(told, str(record.name), None, size, 3, len(classes), *kept)


def _loaded(model: Run | LoadedModel | str | Path) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    return model.loaded if isinstance(model, Run) else load_run(model)
