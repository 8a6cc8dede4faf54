"""One update: accumulate the gradients of its batches, then the optimizer step, skipped if a number is not finite."""

from __future__ import annotations

import contextlib
import hashlib

import torch
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.train.context import TrainState
from fathoms.train.distributed import World, whole
from fathoms.train.guard.readback import Readback, UpdateReport
from fathoms.train.job import Job
from fathoms.train.learner import Learner
from fathoms.train.objective.objective import Objective
from fathoms.train.optim.build import set_lr
from fathoms.train.optim.conditional_step import ConditionalStep
from fathoms.train.precision.cuda_graph import launched


class Stepper:
    """Runs the updates of a run.

    For each: `accumulate` every batch, `gradient_norm`, `finish_previous`, `apply`.

    Args:
        job: The run's recipe and seed.
        world: Its ranks.
        learner: The model, its optimizer and what else trains it.
        objective: The loss.
        channels: Input channels the model takes; further channels of the images are dropped.
    """

    def __init__(self, job: Job, world: World, learner: Learner, objective: Objective, channels: int) -> None:
        self.recipe, self.seed, self.world = job.recipe, job.run.seed, world
        self.learner, self.objective, self.channels = learner, objective, channels
        speed = learner.speed
        self.amp_dtype = getattr(torch, self.recipe.amp_dtype) if speed.precision != "fp32" else None
        self.conditional_step = ConditionalStep(learner.model, learner.optimizer)
        self.readback = Readback(world)
        self._accumulated = 0
        # Loss and hits of this update's batches, added to the epoch's sums if the update is not skipped.
        self.pending = torch.zeros(4, dtype=torch.float64, device=world.device)
        self.forward_backward = launched(
            self._forward_backward, speed.launch, learner.compute_model, world.size
        )

    @property
    def unwrapped_model(self) -> nn.Module:
        """The module that ran the forward pass, without DDP or torch.compile: the model, or its bfloat16 copy."""
        copy = self.learner.compute_copy
        return self.objective.model if copy is None else copy.module

    def replay(self, batch: Batch) -> Tensor:
        """The loss of a batch, computed again without DDP, torch.compile or a CUDA graph."""
        model = self.unwrapped_model
        return self._loss(model, *self._inputs(model, batch))[0]

    def _inputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Seed drop-path and dropout for a batch; its images and targets."""
        model.train()
        torch.manual_seed(batch_seed(self.seed, batch.epoch, batch.number, self.world.rank))
        return batch.images[:, : self.channels], batch.labels if batch.targets is None else batch.targets

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
        if self.learner.buckets is not None:
            self.learner.buckets.reduce()
        self.learner.scaler.unscale_(self.learner.optimizer)
        parameters = [p for p in self.learner.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.recipe.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_grad, norm)
        return whole(norm).detach()

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
        """Take the optimizer step, unless the device finds that the loss or the gradient norm is not finite.

        Args:
            state: The counters; its sums take what the update's batches have added up.
            norm: The gradient norm.
            lr: The learning rate.
            vote: This rank's vote to stop, which travels with the numbers.
        """
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
        """Drop the gradients and counts accumulated so far."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.pending.zero_()


def batch_seed(seed: int, epoch: int, batch: int, rank: int) -> int:
    """The seed of drop-path and dropout for one batch on one rank."""
    text = f"{seed}/{epoch}/{batch}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
