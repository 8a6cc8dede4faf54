"""The signal of every layer in any training loop, and the first layer whose numbers are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fathoms.errors import ConfigError
from fathoms.probes.signal import Signal, probe
from fathoms.probes.verdict import Verdict, drift_verdict
from fathoms.surgery.inputs import check_model
from fathoms.training.guard import DivergedError


class Probe:
    """Measures every block each `every` updates, and stops at the first output or gradient that is not finite.

    Whether a number is finite is noted on the device as the loop runs; the host looks once before each update.

    Args:
        every: Updates between measurements; 0 measures none.
        gradients: Whether gradients must be finite; False under float16's loss scaling, which skips such updates.

    >>> import torch
    >>> from fathoms import create_model
    >>> model = create_model("vit_digits", depth=2)
    >>> optimizer, watch = torch.optim.AdamW(model.parameters()), Probe(every=2).attach(model)
    >>> labels = torch.tensor([3, 1, 4, 1])
    >>> for _ in range(4):
    ...     torch.nn.functional.cross_entropy(model(torch.randn(4, 1, 8, 8)), labels).backward()
    ...     watch.before_step()
    ...     optimizer.step()
    ...     _ = watch.after_step(optimizer, labels)
    >>> [row["step"] for row in watch.rows]
    [2, 4]
    """

    def __init__(self, every: int = 100, *, gradients: bool = True) -> None:
        if not isinstance(every, Integral) or isinstance(every, bool) or every < 0:
            raise ConfigError(f"every={every!r}: use a whole number, 0 or more")
        self.every, self.gradients = every, gradients
        self.updates = 0
        self.rows: list[dict[str, Any]] = []
        """What was measured, as in a run's probe.jsonl."""
        self.signal: Signal | None = None
        """The latest measurement."""
        self._model: nn.Module | None = None
        self._images: Tensor | None = None
        self._labels: Tensor | None = None
        self._seen: list[tuple[str, Tensor]] = []
        self._handles: list[Any] = []
        self._measuring, self._said = False, False

    def attach(self, model: nn.Module, updates: int | None = None) -> Probe:
        """Watch a model from now on; one that was watched before no longer is.

        Args:
            model: The model.
            updates: Updates that it has had, where a run is resumed or begun anew; later measurements are dropped. None
                goes on counting.
        """
        check_model(model, "Probe")
        self.detach()
        if updates is not None:
            self.updates = updates
            self.rows[:] = [row for row in self.rows if row["step"] <= updates]
        self._model = model
        self._handles = [model.register_forward_pre_hook(self._note_batch, with_kwargs=True)]
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_hook(self._note_output(name or "the model")))
        if self.gradients:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    self._handles.append(
                        parameter.register_post_accumulate_grad_hook(self._note_gradient(name))
                    )
        return self

    def detach(self) -> None:
        """Watch nothing any more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen, self._images, self._labels = [], [], None, None

    def _note_batch(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and not self._measuring:
            given = [*args, *kwargs.values()]
            self._images = next((x for x in given if isinstance(x, Tensor) and x.ndim == 4), None)
            self._labels = kwargs.get("labels")

    def _note_output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, _inputs: Any, output: Any) -> None:
            if module.training and not self._measuring:
                self._note(f"in the output of {name}", tensors_in(output))

        return note

    def _note_gradient(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            if parameter.grad is not None and not self._measuring:
                self._note(f"in the gradient of {name}", [parameter.grad])

        return note

    def _note(self, where: str, found: Any) -> None:
        self._seen += [(where, x.detach().isfinite().all()) for x in found if x.is_floating_point()]

    def before_step(self) -> None:
        """After the backward pass: raise `DivergedError` with the first layer whose numbers are not finite."""
        seen, self._seen = self._seen, []
        if not seen:
            return
        finite = torch.stack([flag.to(seen[0][1].device) for _, flag in seen]).tolist()
        if not all(finite):
            raise DivergedError(
                f"update {self.updates + 1}: not a finite number, first {seen[finite.index(False)][0]}; the weights "
                "are those before this update; lower the learning rate, warm up longer, or clip gradients"
            )

    def after_step(
        self,
        optimizer: Optimizer | None = None,
        labels: Tensor | None = None,
        *,
        updates: int | None = None,
    ) -> Signal | None:
        """After an update: measure, if one is due, the batch that the model saw last.

        Args:
            optimizer: For the update-to-weight ratio.
            labels: Classes of that batch; None takes those that the model was given, or draws some and says so once.
            updates: Updates that the loop has counted; None is one more than before.
        """
        before, self.updates = self.updates, self.updates + 1 if updates is None else updates
        # Several optimizers may step at once, past the number at which a measurement is due.
        due = self.every and self.updates // self.every > before // self.every
        if not due or self._model is None:
            return None
        if self._images is None:
            name = type(self._model).__name__
            warnings.warn(
                f"Probe: nothing is measured, since {name} itself is not called with images", stacklevel=2
            )
            return None
        self._measuring = True
        try:
            given = self._labels if labels is None else labels
            if given is None and not self._said:
                self._said = True
                warnings.warn("Probe: the batch has no classes that it knows; labels are drawn", stacklevel=2)
            self.signal = probe(self._model, self._images.detach(), given, optimizer=optimizer)
        finally:
            self._measuring = False
        self.rows.append({"step": self.updates, **self.signal.to_json()})
        return self.signal

    def verdict(self) -> Verdict | None:
        """The trend over the second half of the measurements; None where there are fewer than four."""
        return drift_verdict(self.rows)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output, which may be a tuple or a table of them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from tensors_in(each)
    elif isinstance(output, tuple | list):
        for each in output:
            yield from tensors_in(each)


def labels_in(batch: Any) -> Tensor | None:
    """The classes in a batch: under a usual key of a dict, else the only whole numbers; None where it is open."""
    if isinstance(batch, Mapping):
        found = [batch[key] for key in ("labels", "label", "y", "targets", "target") if key in batch]
    else:
        found = batch if isinstance(batch, tuple | list) else []
    known = [x for x in found if isinstance(x, Tensor) and x.ndim == 1]
    known = [x for x in known if not x.is_floating_point() and not x.is_complex()]
    return known[0] if len(known) == 1 or (known and isinstance(batch, Mapping)) else None
