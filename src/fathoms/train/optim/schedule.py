"""Learning rate schedules: pure functions of the epoch, so that a resumed run needs no state for them.

A registered shape gives the share of the base rate at epoch e of E. `Schedule` adds what all of them have in
common, under timm's names: the minimum, the warm-up, the cool-down, and whether the rate changes within an epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fathoms.errors import ConfigError, flag_of
from fathoms.names.registry import Registry
from fathoms.train.recipe.recipe import epochs_of_run

Epochs = int | float


@dataclass(frozen=True)
class Traits:
    """Properties of a shape: whether it ends at the minimum after its epochs."""

    ends: bool = False


SCHEDULES: Registry[float, Traits] = Registry("schedule", default=Traits())
ENDS = Traits(ends=True)

# From this share of the epochs on, LearnableScaler's schedule is the plain cosine again.
CUSTOM_REJOINS = 0.66


def half_cosine(epoch: Epochs, epochs: Epochs) -> float:
    """Half a cosine, (1 + cos(pi e / E)) / 2, from one to zero."""
    return (1 + math.cos(math.pi * epoch / epochs)) / 2


@SCHEDULES.add("cosine", ENDS)
def cosine(epoch: Epochs, epochs: Epochs) -> float:
    """Half a cosine from the base rate to the minimum.

    Paper: Loshchilov and Hutter 2016, arXiv:1608.03983.
    """
    return half_cosine(epoch, epochs)


@SCHEDULES.add("step")
def step(epoch: Epochs, decay_epochs: Epochs = 90, decay_rate: float = 0.1) -> float:
    """Multiply by `decay_rate` after every `decay_epochs` epochs."""
    return decay_rate ** (epoch // decay_epochs)


@SCHEDULES.add("wsd", ENDS)
def wsd(epoch: Epochs, epochs: Epochs, decay_epochs: Epochs | None = None) -> float:
    """Warm-up, stable, decay: the base rate, then 1 - sqrt(share done) over the last `decay_epochs`.

    `decay_epochs` is a fifth of the epochs unless given.

    Paper: Hägele et al. 2024, arXiv:2405.18392.
    """
    length = 0.2 * epochs if decay_epochs is None else min(decay_epochs, epochs)
    done = epoch - (epochs - length)
    return 1.0 if done <= 0 else 1 - math.sqrt(done / length)


@SCHEDULES.add("custom", ENDS)
def custom(epoch: Epochs, epochs: Epochs, epoch_factor: float = 0.8, epoch_threshold: float = 0.5) -> float:
    """LearnableScaler's schedule: a lowered cosine, a straight line that rejoins the cosine, then the cosine.

    With c the cosine, n = threshold * E and m = int(0.66 E): factor * c(e) before n, from n to m the line
    from factor * c(n) to c(m), and c(e) from m on.
    """
    leaves, rejoins = epoch_threshold * epochs, int(CUSTOM_REJOINS * epochs)
    if epoch < leaves:
        return epoch_factor * half_cosine(epoch, epochs)
    if epoch < rejoins:
        low, high = epoch_factor * half_cosine(leaves, epochs), half_cosine(rejoins, epochs)
        return low + (high - low) * (epoch - leaves) / (rejoins - leaves)
    return half_cosine(epoch, epochs)


@SCHEDULES.add("constant")
def constant(epoch: Epochs) -> float:
    """The base rate throughout."""
    del epoch
    return 1.0


@dataclass(frozen=True)
class Schedule:
    """Learning rate of a run: `lr(epoch)`, with timm's options under timm's names.

    The warm-up is a straight line from `warmup_lr` to the base rate over the first epochs of the shape; with
    `warmup_prefix` it comes before the shape. A shape that ends (cosine, wsd, custom) runs from the base rate
    to `min_lr` and stays there for `cooldown_epochs` more; for "step" `min_lr` is a floor. `None` is the
    shape's own default, and an option that it does not take is refused.

    >>> schedule = Schedule("cosine", base_lr=0.001, epochs=10, warmup_epochs=2, warmup_lr=0.0)
    >>> [round(schedule.lr(epoch), 6) for epoch in (0, 1, 2, 5, 10)]
    [0.0, 0.0005, 0.000905, 0.0005, 0.0]
    """

    sched: str
    base_lr: float
    epochs: int
    min_lr: float = 0.0
    warmup_lr: float = 1e-5
    warmup_epochs: Epochs = 0
    warmup_prefix: bool = False
    cooldown_epochs: Epochs = 0
    decay_epochs: Epochs | None = None
    decay_rate: float | None = None
    epoch_factor: float | None = None
    epoch_threshold: float | None = None
    sched_on_updates: bool = False
    """Whether the rate changes with every update, or with whole epochs only."""

    def __post_init__(self) -> None:
        SCHEDULES.check(self.sched, "--sched")
        self._check_ranges()
        if self.cooldown_epochs and not self._ends:
            raise ConfigError(f"--cooldown-epochs: schedule {self.sched!r} takes none; leave it out")
        if self.min_lr and self.sched == "constant":
            raise ConfigError("--min-lr: schedule 'constant' takes none; leave it out")
        self._share(0.0)

    def _check_ranges(self) -> None:
        if not (math.isfinite(self.base_lr) and self.base_lr > 0):
            raise ConfigError(f"--lr {self.base_lr}: use a learning rate above zero")
        if self.epochs < 1:
            raise ConfigError(f"--epochs {self.epochs}: use 1 or more")
        if not 0 <= self.min_lr <= self.base_lr:
            raise ConfigError(f"--min-lr {self.min_lr}: must be between 0 and --lr {self.base_lr}; lower it")
        for name in ("warmup_lr", "warmup_epochs", "cooldown_epochs"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{flag_of(name)} {getattr(self, name)}: is negative; use 0 or more")
        for name in ("decay_epochs", "decay_rate", "epoch_factor"):
            given = getattr(self, name)
            if given is not None and not given > 0:
                raise ConfigError(f"{flag_of(name)} {given}: must be above zero; raise it or leave it out")
        if self.epoch_threshold is not None and not 0 <= self.epoch_threshold <= 1:
            raise ConfigError(
                f"--epoch-threshold {self.epoch_threshold}: must be between 0 and 1; 0.5 is usual"
            )

    @property
    def _ends(self) -> bool:
        return SCHEDULES.metadata(self.sched).ends

    @property
    def total_epochs(self) -> Epochs:
        """Epochs of the whole run: the shape, a warm-up before it, and the cool-down."""
        return epochs_of_run(self.epochs, self.warmup_epochs, self.warmup_prefix, self.cooldown_epochs)

    def notices(self) -> list[str]:
        """A line where the warm-up outlasts the run."""
        if self.warmup_prefix or self.warmup_epochs <= self.total_epochs:
            return []
        return [
            f"--warmup-epochs {self.warmup_epochs:g}: the warm-up is longer than the run of {self.total_epochs:g} "
            f"epochs, so that the rate never reaches --lr {self.base_lr:g}"
        ]

    def lr(self, epoch: Epochs) -> float:
        """The learning rate at `epoch`, which may be fractional: updates done over updates per epoch."""
        if not self.sched_on_updates:
            epoch = math.floor(epoch)
        if epoch < self.warmup_epochs:
            return self.warmup_lr + epoch * (self.base_lr - self.warmup_lr) / self.warmup_epochs
        if self.warmup_prefix:
            epoch -= self.warmup_epochs
        if not self._ends:
            return max(self.min_lr, self.base_lr * self._share(epoch))
        if epoch >= self.epochs:
            return self.min_lr
        return self.min_lr + (self.base_lr - self.min_lr) * self._share(epoch)

    def _share(self, epoch: Epochs) -> float:
        """The share of the base rate at `epoch`."""
        return SCHEDULES.build(
            self.sched,
            epoch,
            epochs=self.epochs if self._ends else None,
            decay_epochs=self.decay_epochs,
            decay_rate=self.decay_rate,
            epoch_factor=self.epoch_factor,
            epoch_threshold=self.epoch_threshold,
        )
