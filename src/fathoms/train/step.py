"""One update: its batches forward and back, and the optimizer's step unless a number is not finite."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from fathoms.data import Batch
from fathoms.train.context import Scene
from fathoms.train.distributed import whole
from fathoms.train.guard.readback import Seen, Watch
from fathoms.train.learner import Learner
from fathoms.train.objective.objective import Objective
from fathoms.train.optim.build import set_lr
from fathoms.train.optim.conditional_step import Gate
from fathoms.train.precision.cuda_graph import launched
from fathoms.train.train_state import Course


class Stepper:
    """Takes the updates of a run: `add` each batch, then `gradient_norm`, `settle` the update before, `take`.

    Args:
        scene: The run's recipe, seed and processes.
        learner: What is trained.
        objective: What is minimised.
        channels: The model sees so many of an image's.
    """

    def __init__(self, scene: Scene, learner: Learner, objective: Objective, channels: int) -> None:
        self.recipe, self.seed, self.world = scene.job.recipe, scene.job.run.seed, scene.world
        self.learner, self.objective, self.channels = learner, objective, channels
        self.amp_dtype = getattr(torch, self.recipe.amp_dtype) if self.recipe.policy != "fp32" else None
        self.gate, self.watch = Gate(learner.model, learner.optimizer), Watch(self.world)
        # What the batches of the update under way add to the sums, if it goes through.
        self.fresh = torch.zeros(4, dtype=torch.float64, device=self.world.device)
        self.compute = launched(self._compute, self.recipe.launch, learner.student, self.world.size)

    @property
    def computing(self) -> nn.Module:
        """What has computed an update, as it is without ranks and compiler: the model, or its narrow copies."""
        return self.objective.student if self.learner.copies is None else self.learner.copies.module

    def loss(self, student: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, with the noise that belongs to its place."""
        return self._loss(student, *self._place(student, batch))[0]

    def _place(self, student: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Set the noise of a batch's place; its images and targets."""
        student.train()
        torch.manual_seed(step_seed(self.seed, batch.epoch, batch.number, self.world.rank))
        return batch.images[:, : self.channels], batch.labels if batch.targets is None else batch.targets

    def _loss(self, student: nn.Module, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(images.device.type, dtype=self.amp_dtype, enabled=self.amp_dtype is not None):
            return self.objective.loss(student, images, targets)

    def _compute(self, images: Tensor, targets: Tensor, parts: Tensor) -> tuple[Tensor, ...]:
        """Loss and logits of a batch that is one of `parts`; its share of the gradients is left in the parameters."""
        loss, logits = self._loss(self.learner.student, images, targets)
        self.learner.scaler.scale(loss / parts).backward()
        return loss.detach(), logits.detach()

    def add(self, batch: Batch, parts: int, first: bool) -> None:
        """Gradients of a batch, one of the `parts` of an update, and whether it is the first of them."""
        if first:
            self.gate.open()
        images, targets = self._place(self.learner.student, batch)
        # A tensor, so that a graph does not hold the number it was captured with.
        loss, logits = self.compute(images, targets, torch.full((), float(parts), device=images.device))
        if self.learner.copies is not None:
            self.learner.copies.pull_gradients()
        hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == batch.labels[:, None]
        counts = (len(batch) * loss, hits[:, 0].sum(), hits.any(dim=1).sum())
        self.fresh += torch.stack([*counts, hits.new_full((), len(batch), dtype=torch.float64)]).double()

    def gradient_norm(self) -> Tensor:
        """The norm of the whole gradient, which is then cut to --clip-grad."""
        self.learner.scaler.unscale_(self.learner.optimizer)
        parameters = [p for p in self.learner.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.recipe.clip_grad is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip_grad, norm)
        return whole(norm).detach()

    def settle(self) -> Seen | None:
        """What became of the update before, which is averaged in if it went through; None if that is known."""
        seen = self.watch.read()
        if seen is not None:
            self.gate.settle(seen.held)
            if self.learner.ema is not None and not seen.held:
                self.learner.ema.update(self.learner.model, seen.update + 1)
        return seen

    def take(self, course: Course, norm: Tensor, lr: float, vote: int) -> None:
        """Take the step, unless the device finds a number in it that is not finite."""
        first = course.step - 1 - (course.step - 1) % self.recipe.grad_accum_steps
        loss = self.fresh[0] / self.fresh[3]
        hold = self.watch.post(course.updates, course.epoch, (first, course.step), loss, norm, vote)
        set_lr(self.learner.optimizer, lr)
        self.gate.step(hold)
        self.learner.scaler.update()
        if self.learner.copies is not None:
            self.learner.copies.push_weights()
        course.sums += torch.where(hold > 0, 0.0, self.fresh)
        self.forget()

    def forget(self) -> None:
        """Put away the gradients and the counts of the batches so far."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.fresh.zero_()


def step_seed(seed: int, epoch: int, step: int, rank: int) -> int:
    """The seed of drop-path and dropout in one step on one rank."""
    text = f"{seed}/{epoch}/{step}/{rank}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
