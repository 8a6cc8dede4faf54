"""Stacked Muon: matrices of one shape are orthogonalised together, so that a deep model needs few launches."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fathoms.errors import ConfigError
from fathoms.names.optimizers import MUON_STRETCH
from fathoms.train.distributed import is_sharded, own_part
from fathoms.train.optim.closure import loss_of
from fathoms.train.optim.conditional_step import hold_of, put_back_
from fathoms.train.optim.plain import PlainOptimizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

# Largest number of elements of a stack (256 MB in bfloat16); more matrices of its shape make another one.
LIMIT = 2**27

# Length of a step on a matrix of rows x columns, in learning rates, under torch's names of `adjust_lr_fn`.
STRETCH: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: MUON_STRETCH * math.sqrt(max(rows, columns)),
}


class Settings(NamedTuple):
    """Settings that the matrices of a stack share besides their shape."""

    momentum: float
    nesterov: bool
    coefficients: tuple[float, float, float]
    steps: int
    eps: float


class Matrix(NamedTuple):
    """A parameter to update, with the numbers of its group."""

    parameter: Tensor
    gradient: Tensor
    buffer: Tensor
    kept: float
    """Factor of weight decay on the parameter."""
    rate: float


class StackedMuon(PlainOptimizer, torch.optim.Muon):
    """torch's Muon, with the same groups, settings and state, one stack of matrices at a time.

    With G the gradient, B <- B + (1 - momentum) (G - B) and O the Newton-Schulz iterate of G + momentum (B - G)
    in bfloat16: W <- (1 - lr * weight_decay) W - lr * stretch * O. O does not depend on a learning rate, so groups
    that differ in it (layer decay) share stacks.

    If matrices are sharded over ranks (FSDP2), each rank orthogonalises its share of a stack.
    """

    # torch's name for: the optimizer reads `found_inf`, and does nothing if it is one (see conditional_step.py).
    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every matrix that has a gradient."""
        loss = loss_of(closure)
        hold = hold_of(self)
        go = None if hold is None else 1 - hold
        for settings, stack in self._stacks():
            _move(settings, stack, go)
        return loss

    def _stacks(self) -> Iterator[tuple[Settings, list[Matrix]]]:
        """Matrices with a gradient, grouped into those that can be stacked."""
        alike: dict[Any, list[Matrix]] = defaultdict(list)
        for group in self.param_groups:
            settings = _settings(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    spread = _spread(parameter)
                    key = (settings, parameter.shape, parameter.dtype, parameter.device, spread)
                    alike[key].append(self._matrix(group, parameter, parameter.grad))
        for (settings, shape, *_), matrices in alike.items():
            most = max(1, LIMIT // max(1, shape.numel()))
            for first in range(0, len(matrices), most):
                yield settings, matrices[first : first + most]

    def _matrix(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Matrix:
        if parameter.is_complex():
            raise ConfigError("muon: a parameter is complex; use adamw")
        if gradient.is_sparse:
            raise ConfigError("muon: a gradient is sparse; use adamw")
        if _spread(gradient) != _spread(parameter):
            raise ConfigError("muon: a gradient is sharded differently from its parameter; shard both alike")
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        lr, stretch = group["lr"], STRETCH[group["adjust_lr_fn"]](*parameter.shape)
        kept = 1 - lr * group["weight_decay"]
        return Matrix(parameter, gradient, state["momentum_buffer"], kept, lr * stretch)


def _settings(group: dict[str, Any]) -> Settings:
    if isinstance(group["lr"], Tensor):
        raise ConfigError("muon: a group's lr is a tensor; give a number")
    if group["adjust_lr_fn"] not in STRETCH:
        raise ConfigError(f"muon: adjust_lr_fn is {group['adjust_lr_fn']!r}; use one of {[*STRETCH]}")
    coefficients = tuple(group["ns_coefficients"])
    return Settings(group["momentum"], group["nesterov"], coefficients, group["ns_steps"], group["eps"])


def _move(settings: Settings, stack: list[Matrix], go: Tensor | None) -> None:
    """Update matrices of one shape; if `go` is zero, they and their momentum stay as they are."""
    params = [own_part(matrix.parameter) for matrix in stack]
    grads = [own_part(matrix.gradient) for matrix in stack]
    buffers = [own_part(matrix.buffer) for matrix in stack]
    # New values are kept apart from the old ones, which a skipped update keeps.
    fresh = torch._foreach_lerp(buffers, grads, 1 - settings.momentum)
    _put(buffers, fresh, go)
    ahead = torch._foreach_lerp(grads, fresh, settings.momentum) if settings.nesterov else fresh
    narrow = torch.empty((len(stack), *params[0].shape), dtype=torch.bfloat16, device=params[0].device)
    torch._foreach_copy_(narrow.unbind(), ahead)
    del fresh, ahead
    update = _orthogonalized_together(narrow, stack[0].parameter, settings)
    # At least float32, where the learning rate is multiplied in.
    steps = update.to(torch.promote_types(params[0].dtype, torch.float32)).unbind()
    torch._foreach_mul_(steps, [-matrix.rate for matrix in stack])
    moved = torch._foreach_mul(params, [matrix.kept for matrix in stack])
    torch._foreach_add_(moved, steps)
    _put(params, moved, go)


def _put(now: list[Tensor], new: Any, go: Tensor | None) -> None:
    """Copy `new` into `now`; if `go` is zero, leave it, bit for bit."""
    if go is None:
        torch._foreach_copy_(now, new)
    else:
        put_back_(now, new, go)


def orthogonalized(
    stack: Float[Tensor, "n rows columns"], settings: Settings
) -> Float[Tensor, "n rows columns"]:
    """Orthogonalise each matrix by Newton-Schulz: X <- aX + (bA + cAA)X with A = XX', from X / |X|.

    Tall matrices are transposed, so that A is small. Singular values end near one.

    Paper: Jordan et al. 2024, kellerjordan.github.io/posts/muon.
    """
    a, b, c = settings.coefficients
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=settings.eps)
    for _ in range(settings.steps):
        gram = torch.bmm(x, x.mT)
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a)
    return (x.mT if tall else x).contiguous()


class Spread(NamedTuple):
    """Sharding of a matrix over ranks (FSDP2)."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]


def _spread(parameter: Tensor) -> Spread | None:
    """Sharding of a parameter; None if this rank has all of it."""
    if not is_sharded(parameter):
        return None
    from torch.distributed.tensor import Replicate, Shard

    for placement in parameter.placements:
        if type(placement) not in (Shard, Replicate):
            raise ConfigError(f"muon: a matrix is placed on ranks as {placement}; shard it with fully_shard")
    return Spread(parameter.device_mesh, parameter.placements)


def _orthogonalized_together(parts: Tensor, like: Tensor, settings: Settings) -> Tensor:
    """This rank's parts of the matrices of a stack, orthogonalised.

    If `like` is sharded, the ranks first exchange parts, so that each has some of the matrices whole.
    """
    spread = _spread(like)
    if spread is None:
        return orthogonalized(parts, settings)
    from torch.distributed.tensor import Shard

    shape = torch.Size((len(parts), *like.shape))
    cut = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in spread.placements]
    dealt = [Shard(0) if isinstance(p, Shard) else p for p in spread.placements]
    whole = _traded(parts, shape, spread.mesh, cut, dealt)
    return _traded(orthogonalized(whole, settings), shape, spread.mesh, dealt, cut)


def _traded(
    own: Tensor, shape: torch.Size, mesh: DeviceMesh, before: list[Placement], after: list[Placement]
) -> Tensor:
    """This rank's part of a tensor of `shape` after a change of its placements."""
    from torch.distributed.tensor import DTensor

    stride = (shape[1] * shape[2], shape[2], 1)
    spread = DTensor.from_local(own, mesh, before, run_check=False, shape=shape, stride=stride)
    return spread.redistribute(placements=after).to_local()
