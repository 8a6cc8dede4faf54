"""Run another project's train.py as it is, and note what it resolved, its batches, losses and gradient norms.

    python benchmarks/duel_peer.py FOLDER NOTES STOP_AFTER train.py's own words

FOLDER holds train.py and the timm that it imports; nothing of it is changed or copied. NOTES is a file for torch.load,
or "-" for a plain run. STOP_AFTER is "start" (nothing is trained), "draws" (the images of all epochs are drawn and
measured, nothing is trained) or "end". Importing this imports nothing of fathoms.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from duel_draws import measured


class Recorded:
    """A loader that keeps what it yields."""

    def __init__(self, loader: Any, kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._loader, self._kept = loader, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, targets in self._loader:
            self._kept.append((images.clone(), targets.clone()))
            yield images, targets


class Notes:
    """What a train.py does, noted from outside."""

    def __init__(self) -> None:
        self.taken: dict[str, Any] = {}
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.updates: list[dict[str, float]] = []
        self._loss = self._norm = 0.0

    def watch(self, script: Any) -> None:
        """Keep what the script's own functions return, and every update."""
        for name in ("create_model", "resolve_data_config", "create_optimizer_v2"):
            setattr(script, name, self._kept(name, getattr(script, name)))
        backward, clip = torch.Tensor.backward, nn.utils.clip_grad_norm_

        def noted_backward(loss: torch.Tensor, *words: Any, **options: Any) -> None:
            self._loss += loss.item()
            backward(loss, *words, **options)

        def noted_clip(*words: Any, **options: Any) -> torch.Tensor:
            norm = clip(*words, **options)
            self._norm = float(norm)
            return norm

        def noted_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            row = {"loss": self._loss, "norm": self._norm, "lr": optimizer.param_groups[0]["lr"]}
            self.updates.append(row)
            self._loss = 0.0

        torch.Tensor.backward = noted_backward  # type: ignore[method-assign]
        nn.utils.clip_grad_norm_ = noted_clip  # type: ignore[assignment]
        register_optimizer_step_pre_hook(noted_step)

    def _kept(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def keep(*words: Any, **options: Any) -> Any:
            self.taken[name] = made(*words, **options)
            return self.taken[name]

        return keep

    def start(self, args: Any) -> dict[str, Any]:
        """Everything that is settled before the first batch."""
        model, optimizer = self.taken["create_model"], self.taken["create_optimizer_v2"]
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [
            {
                **{
                    key: value
                    for key, value in group.items()
                    if isinstance(value, bool | int | float | tuple)
                },
                "names": [names[parameter] for parameter in group["params"]],
            }
            for group in optimizer.param_groups
        ]
        plain = bool | int | float | str | tuple | list | type(None)
        return {
            "args": {key: value for key, value in vars(args).items() if isinstance(value, plain)},
            "pixels": dict(self.taken["resolve_data_config"]),
            "optimizer": type(optimizer).__name__,
            "groups": groups,
            "drop_path": [getattr(part, "drop_prob", 0.0) for part in branches(model)],
            "state": {key: value.clone() for key, value in model.state_dict().items()},
        }


def branches(model: nn.Module) -> list[nn.Module]:
    """The drop-path of each block's first branch; an Identity where there is none."""
    return [
        getattr(block, "drop_path1", None) or getattr(block, "drop_path", nn.Identity())
        for block in model.blocks  # type: ignore[union-attr]
    ]


def on_this_device(function: Callable[..., Any]) -> None:
    """The default device of a function, which is CUDA, becomes the one that there is."""
    if not torch.cuda.is_available():
        given = function.__defaults__ or ()
        function.__defaults__ = tuple(
            torch.device("cpu") if isinstance(value, torch.device) else value for value in given
        )


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with a train.py and the timm beside it")
    parser.add_argument("notes", help="a file, or - for none")
    parser.add_argument("stop", choices=("start", "draws", "end"))
    parser.add_argument("words", nargs=argparse.REMAINDER, help="train.py's own")
    given = parser.parse_args()
    notes_file, stop = given.notes, given.stop
    sys.path.insert(0, str(given.folder))
    sys.argv = ["train.py", *given.words]
    spec = importlib.util.spec_from_file_location("peer_train", given.folder / "train.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["peer_train"] = script
    spec.loader.exec_module(script)
    for name in ("train_one_epoch", "validate"):
        on_this_device(getattr(script, name))
    notes = Notes()
    if notes_file == "-":
        script.main()
        return
    notes.watch(script)
    train, started = script.train_one_epoch, dict[str, Any]()

    def noted(epoch: int, model: nn.Module, loader: Any, *rest: Any, **options: Any) -> Any:
        if not started:
            args = next(value for value in rest if hasattr(value, "grad_accum_steps"))
            started.update(notes.start(args), batches_per_epoch=len(loader))
            started["transforms"] = str(getattr(loader, "dataset", loader.loader.dataset).transform)
            if stop == "draws":
                started["draws"] = measured(batch for _ in range(args.epochs) for batch in loader)
            if stop != "end":
                raise SystemExit(0)
        return train(epoch, model, Recorded(loader, notes.batches), *rest, **options)

    script.train_one_epoch = noted
    try:
        script.main()
    finally:
        torch.save({**started, "batches": notes.batches, "updates": notes.updates}, notes_file)


if __name__ == "__main__":
    main()
