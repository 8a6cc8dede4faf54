"""One update: gradients of its batches, then an optimizer step that the device skips if a number is not finite.

The device decides at once whether an update may happen. The host reads the numbers one update later, when they have
long arrived.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.models.vit import ViT
from fathoms.training.compiling import GraphedStep
from fathoms.training.distributed import World, whole
from fathoms.training.job import Job
from fathoms.training.learner import Learner, TrainState
from fathoms.training.objective import Objective
from fathoms.training.optimization import set_lr
from fathoms.training.optimizer_step import COUNTER, put_back_, step_unless
from fathoms.training.run_folder import RunFolder


@dataclass(frozen=True)
class UpdateReport:
    """One update as the host sees it, the same on every rank."""

    update: int
    """Its number, counted from 0."""
    epoch: int
    batches: tuple[int, int]
    """First and last batch of the epoch that it accumulated, the last excluded."""
    loss: float
    """Mean over its batches and all ranks."""
    norm: float
    """Norm of the gradient."""
    votes: int
    """Sum of the ranks' votes to stop."""

    @property
    def nonfinite(self) -> bool:
        """Whether loss or gradient norm is NaN or infinite; the device then skipped the update."""
        return not (math.isfinite(self.loss) and math.isfinite(self.norm))


class Readback:
    """Holds the numbers of at most one update: `send` them, and `read` them before the next are sent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._sent: tuple[int, int, tuple[int, int]] | None = None
        on_gpu = world.device.type == "cuda"
        self._event = torch.cuda.Event() if on_gpu else None
        self._host = torch.zeros(3, dtype=torch.float64, pin_memory=on_gpu)

    def send(
        self, update: int, epoch: int, batches: tuple[int, int], loss: Tensor, norm: Tensor, vote: int
    ) -> Tensor:
        """Sum an update's numbers over the ranks and start the copy; returns, on the device, 1 to skip it, else 0."""
        device = self.world.device
        numbers = [loss.double(), norm.double().to(device), torch.full((), vote, device=device).double()]
        sums = torch.stack(numbers)
        if self.world.size > 1:
            dist.all_reduce(sums)
        self._host.copy_(sums, non_blocking=True)
        if self._event is not None:
            self._event.record()
        self._sent = (update, epoch, batches)
        return (~sums.isfinite().all()).float()

    def read(self) -> UpdateReport | None:
        """The numbers sent last; None if they have been read."""
        if self._sent is None:
            return None
        if self._event is not None:
            self._event.synchronize()
        (update, epoch, batches), self._sent = self._sent, None
        loss, norm, votes = self._host.tolist()
        size = self.world.size
        return UpdateReport(update, epoch, batches, loss / size, norm / size, int(votes))


class ConditionalStep:
    """Makes an update conditional: parameters, moments, counters, and the statistics of BatchNorm.

    On a CPU the flag is read at once, and the optimizer step is simply not taken.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        self.buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._before: list[Tensor] | None = None
        self._stepped = False

    def begin(self) -> None:
        """Call before the first forward pass of an update, which may change statistics."""
        self._before = [buffer.clone() for buffer in self.buffers]

    def step(self, hold: Tensor) -> None:
        """Take the optimizer step unless `hold` is one."""
        self._stepped = hold.device.type != "cpu"
        if self._stepped:
            step_unless(self.optimizer, hold)
        elif not bool(hold):
            self.optimizer.step()
        if self._before is not None:
            put_back_(self.buffers, self._before, hold)
        self._before = None

    def settled_statistics(self) -> dict[Tensor, Tensor]:
        """By buffer, the statistics after the last step, where forward passes of the next one have moved them on."""
        return {} if self._before is None else dict(zip(self.buffers, self._before, strict=True))

    def abandon(self) -> None:
        """Undo what the forward passes of an update without a step have done to the statistics."""
        for buffer, before in self.settled_statistics().items():
            buffer.copy_(before)
        self._before = None

    def settle(self, held: bool) -> None:
        """Once the host knows the flag: undo the counters that are kept on the host."""
        if held and self._stepped:
            for group in self.optimizer.param_groups:
                if COUNTER in group:
                    group[COUNTER] -= 1


class Stepper:
    """Runs the updates of a run.

    For each: `accumulate` every batch, `gradient_norm`, `finish_previous`, `apply`.
    """

    def __init__(
        self,
        job: Job,
        world: World,
        learner: Learner,
        objective: Objective,
        channels: int,
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.recipe, self.seed, self.world = job.recipe, job.run.seed, world
        self.learner, self.objective, self.channels = learner, objective, channels
        speed = learner.speed
        self.amp_dtype = getattr(torch, self.recipe.amp_dtype) if speed.precision != "fp32" else None
        self.conditional_step = ConditionalStep(learner.model, learner.optimizer)
        self.readback = Readback(world)
        self.sharded = job.run.fsdp
        self._accumulated = 0
        # Loss and hits of this update's batches, added to the epoch's sums if the update is not skipped.
        self.pending = torch.zeros(4, dtype=torch.float64, device=world.device)
        self.forward_backward: Callable[..., tuple[Tensor, ...]] = self._forward_backward
        if speed.launch == "graph":
            self.forward_backward = GraphedStep(
                self._forward_backward, learner.compute_model.parameters(), warn
            )

    @property
    def unwrapped_model(self) -> nn.Module:
        """The module that ran the forward pass, without DDP or torch.compile: the model, or its bfloat16 copy."""
        copy = self.learner.compute_copy
        return self.objective.model if copy is None else copy.module

    def set_image_size(self, size: int) -> None:
        """Set the image size of the model, and of its bfloat16 copy, which has a size of its own."""
        for part in {self.learner.model, *self.learner.compute_model.modules()}:
            if isinstance(part, ViT):
                part.set_image_size(size)

    def replay(self, batch: Batch) -> Tensor:
        """The loss of a batch, computed again without DDP, torch.compile or a CUDA graph."""
        model = self.unwrapped_model
        return self._loss(model, *self._inputs(model, batch))[0]

    def _inputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Seed drop-path and dropout for a batch; its images and targets."""
        model.train()
        torch.manual_seed(batch_seed(self.seed, batch.epoch, batch.number, self.world.rank))
        # Some of the channels are a view with gaps. Compiled code asks for the strides that it was compiled for, so
        # the model always sees one layout, whatever the source.
        images = batch.images[:, : self.channels].contiguous()
        return images, batch.labels if batch.targets is None else batch.targets

    def _loss(self, model: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(images.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
            return self.objective.loss(model, images, targets)

    def _forward_backward(self, images: Tensor, targets: Tensor, parts: Tensor) -> tuple[Tensor, ...]:
        """Loss and logits of one of `parts` batches; its share of the gradients is left in the parameters."""
        loss, logits = self._loss(self.learner.compute_model, images, targets)
        self.learner.scaler.scale(loss / parts).backward()
        return loss.detach(), logits.detach()

    def accumulate(self, batch: Batch, parts: int, first: bool) -> None:
        """Add the gradients of a batch, the `first` or a later one of the `parts` batches of an update."""
        if first:
            self.conditional_step.begin()
            self._accumulated = 0
        self._accumulated += 1
        images, targets = self._inputs(self.learner.compute_model, batch)
        # A tensor, so that a graph does not hold the number it was captured with.
        share = torch.full((), float(parts), device=images.device)
        with self._averaging(self._accumulated == parts):
            loss, logits = self.forward_backward(images, targets, share)
        if self.learner.compute_copy is not None:
            self.learner.compute_copy.pull_gradients()
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.labels[:, None]
        counts = (len(batch) * loss, hits[:, 0].sum(), hits.any(dim=1).sum())
        self.pending += torch.stack([*counts, hits.new_full((), len(batch), dtype=torch.float64)]).double()

    def _averaging(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Let DDP average the gradients over ranks once an update, with its last batch."""
        model = self.learner.compute_model
        if last or not isinstance(model, nn.parallel.DistributedDataParallel):
            return contextlib.nullcontext()
        return model.no_sync()

    def gradient_norm(self) -> Tensor:
        """The norm of the whole gradient, averaged over the ranks, which is then clipped to --clip-grad."""
        if self.learner.means is not None:
            self.learner.means.reduce()
        self.learner.scaler.unscale_(self.learner.optimizer)
        parameters = [p for p in self.learner.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.recipe.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_grad, norm)
        return (whole(norm) if self.sharded else norm).detach()

    def finish_previous(self) -> UpdateReport | None:
        """Read how the previous update went, and average it into the EMA if it was applied; None if already read."""
        report = self.readback.read()
        if report is not None:
            self.conditional_step.settle(report.nonfinite)
            if self.learner.ema is not None and not report.nonfinite:
                # The statistics of that update, whether the next one's forward passes have come already or not.
                settled = self.conditional_step.settled_statistics()
                self.learner.ema.update(self.learner.model, report.update + 1, settled)
        return report

    def abandon(self) -> None:
        """Undo the batches of an update that will not be applied."""
        self.conditional_step.abandon()
        self.clear()

    def apply(self, state: TrainState, norm: Tensor, lr: float, vote: int) -> None:
        """Take the optimizer step, unless the device finds that the loss or the gradient norm is not finite."""
        first = state.batch - 1 - (state.batch - 1) % self.recipe.grad_accum_steps
        loss = self.pending[0] / self.pending[3]
        skip = self.readback.send(state.updates, state.epoch, (first, state.batch), loss, norm, vote)
        set_lr(self.learner.optimizer, lr)
        self.conditional_step.step(skip)
        self.learner.scaler.update()
        if self.learner.compute_copy is not None:
            self.learner.compute_copy.push_weights()
        state.sums += torch.where(skip > 0, 0.0, self.pending)
        self.clear()

    def clear(self) -> None:
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.pending.zero_()


def batch_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """The seed of drop-path and dropout for one batch on one rank."""
    text = f"{seed}/{epoch}/{batch}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


FILE = "updates.jsonl"
ROW = 100
"""Updates of a row; fewer before a checkpoint, at a gap and at the end."""


class UpdateLog:
    """Loss and gradient norm of every update, as rows of updates.jsonl that hold many updates each."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.first, self.losses, self.norms = 0, list[float](), list[float]()
        self._latest: deque[float] = deque(maxlen=20)
        self._norm: float | None = None

    def add(self, update: int, loss: float, norm: float) -> None:
        """Note update number `update`, counted from 1."""
        if self.losses and (update != self.first + len(self.losses) or len(self.losses) >= ROW):
            self.flush()
        if not self.losses:
            self.first = update
        # Five digits are more than a chart shows.
        self.losses.append(float(f"{loss:.5g}"))
        self.norms.append(float(f"{norm:.5g}"))
        self._latest.append(loss)
        self._norm = norm

    def flush(self) -> None:
        if self.losses:
            self.folder.append(FILE, {"update": self.first, "loss": self.losses, "gradient_norm": self.norms})
        self.clear()

    def clear(self) -> None:
        """Drop what has been noted and not written: those updates are done again."""
        self.losses, self.norms = [], []

    def live(self) -> dict[str, str]:
        """The gradient norm of the latest update, before it is clipped, for the progress line."""
        return {} if self._norm is None else {"grad norm": f"{self._norm:.3g}"}

    def recent(self) -> float | None:
        """Mean loss of the latest updates; None before the first."""
        return sum(self._latest) / len(self._latest) if self._latest else None
