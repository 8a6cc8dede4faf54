"""Muon for the matrices inside the blocks and AdamW for all other parameters, as one optimizer.

Matrices of one shape are orthogonalised together, so that a deep model needs few launches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fathoms.errors import ConfigError
from fathoms.optimizer_facts import BETAS, EPS, MUON_STRETCH, takes_muon
from fathoms.training.distributed import is_sharded, own_part
from fathoms.training.optimizer_step import AdamW, PlainOptimizer, hold_of, loss_of, put_back_, step_unless

# Largest number of elements of a stack (256 MB in bfloat16); more matrices of its shape make another one.
LIMIT = 2**27
# a, b and c of the Newton-Schulz iteration, its number of steps, and the least norm that it divides by.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
LEAST_NORM = 1e-7


class MuonWithAdamW(PlainOptimizer):
    """Muon on groups whose "algorithm" is "muon", torch's AdamW on those where it is "adamw".

    With G the gradient, B <- B + (1 - momentum) (G - B) and O the Newton-Schulz iterate of G + momentum (B - G) in
    bfloat16: W <- (1 - lr * weight_decay) W - lr * 0.2 sqrt(max side) * O. So scaled, as in Moonlight, a step is as
    long as AdamW's, and one learning rate and one weight decay serve both. O does not depend on a learning rate, so
    groups that differ in it (layer decay) share stacks. If matrices are sharded over ranks (FSDP2), each rank
    orthogonalises its share of a stack.

    Args:
        params: Groups, each with an "algorithm".
        lr: Learning rate.
        momentum: Muon's Nesterov momentum.
        betas: AdamW's decay of the two moments.
        eps: AdamW's term in the denominator.
        fused: Whether AdamW runs as one kernel; None lets torch choose.

    Papers: Jordan et al. 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982.
    """

    # torch's name for: the optimizer reads `found_inf`, and does nothing if it is one (see `step_unless`).
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = BETAS,
        eps: float = EPS,
        fused: bool | None = None,
    ) -> None:
        super().__init__(list(params), {"lr": lr, "weight_decay": 0.0})
        self.momentum = momentum
        # AdamW fills its defaults into copies of its groups, which then take their place.
        rest = [dict(group) for group in self.param_groups if group["algorithm"] == "adamw"]
        self._adamw = AdamW(rest, lr, betas, eps, fused=fused) if rest else None
        filled = iter([] if self._adamw is None else self._adamw.param_groups)
        self.param_groups = [
            next(filled) if group["algorithm"] == "adamw" else group for group in self.param_groups
        ]
        self._share()

    def _share(self) -> None:
        """Point AdamW to this optimizer's groups and state, so that a rate set here holds there."""
        if self._adamw is not None:
            self._adamw.param_groups = [group for group in self.param_groups if group["algorithm"] == "adamw"]
            self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss, hold = loss_of(closure), hold_of(self)
        go = None if hold is None else 1 - hold
        alike: dict[Any, list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
        for group in self.param_groups:
            for matrix in group["params"] if group["algorithm"] == "muon" else ():
                if matrix.grad is not None:
                    alike[matrix.shape, matrix.dtype, matrix.device].append((matrix, group))
        for (shape, *_), stack in alike.items():
            most = max(1, LIMIT // max(1, shape.numel()))
            for first in range(0, len(stack), most):
                self._move(stack[first : first + most], go)
        if self._adamw is not None and hold is None:
            self._adamw.step()
        elif self._adamw is not None and hold is not None:
            step_unless(self._adamw, hold)
        return loss

    def _move(self, stack: list[tuple[Tensor, dict[str, Any]]], go: Tensor | None) -> None:
        """Update matrices of one shape, each with the numbers of its group, unless `go` is zero."""
        for matrix, _ in stack:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        params = [own_part(matrix) for matrix, _ in stack]
        grads = [own_part(matrix.grad) for matrix, _ in stack if matrix.grad is not None]
        buffers = [own_part(self.state[matrix]["momentum_buffer"]) for matrix, _ in stack]
        # New values are kept apart from the old ones, which a skipped update keeps.
        fresh = torch._foreach_lerp(buffers, grads, 1 - self.momentum)
        _put(buffers, fresh, go)
        narrow = torch.empty((len(stack), *params[0].shape), dtype=torch.bfloat16, device=params[0].device)
        torch._foreach_copy_(narrow.unbind(), torch._foreach_lerp(grads, fresh, self.momentum))
        del fresh
        update = _orthogonalized_together(narrow, stack[0][0])
        # At least float32, where the learning rate is multiplied in.
        steps = update.to(torch.promote_types(params[0].dtype, torch.float32)).unbind()
        stretch = MUON_STRETCH * math.sqrt(max(stack[0][0].shape))
        torch._foreach_mul_(steps, [-(group["lr"] * stretch) for _, group in stack])
        moved = torch._foreach_mul(params, [1 - group["lr"] * group["weight_decay"] for _, group in stack])
        torch._foreach_add_(moved, steps)
        _put(params, moved, go)


def _put(now: list[Tensor], new: Any, go: Tensor | None) -> None:
    """Copy `new` into `now`; if `go` is zero, leave it, bit for bit."""
    if go is None:
        torch._foreach_copy_(now, new)
    else:
        put_back_(now, new, go)


def orthogonalized(stack: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Orthogonalise each matrix by Newton-Schulz: X <- aX + (bA + cAA)X with A = XX', from X / |X|.

    Tall matrices are transposed, so that A is small. Singular values end near one.
    """
    a, b, c = COEFFICIENTS
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.mT)
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, inner, x, beta=a)
    return (x.mT if tall else x).contiguous()


def _orthogonalized_together(parts: Tensor, like: Tensor) -> Tensor:
    """This rank's parts of the matrices of a stack, orthogonalised.

    If `like` is sharded, the ranks first exchange parts, so that each has some of the matrices whole.
    """
    if not is_sharded(like):
        return orthogonalized(parts)
    from torch.distributed.tensor import DTensor, Shard

    mesh, shape = like.device_mesh, torch.Size((len(parts), *like.shape))
    cut = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in like.placements]
    dealt = [Shard(0) if isinstance(p, Shard) else p for p in like.placements]

    def traded(own: Tensor, before: Any, after: Any) -> Tensor:
        stride = (shape[1] * shape[2], shape[2], 1)
        spread = DTensor.from_local(own, mesh, before, run_check=False, shape=shape, stride=stride)
        return spread.redistribute(placements=after).to_local()

    return traded(orthogonalized(traded(parts, cut, dealt)), dealt, cut)


def split_for_muon(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, each split in two if it has parameters for both algorithms.

    Where the learning rate depends on the width, matrices take Muon's rule instead of Adam's: a step of
    0.2 sqrt(max side) times an orthogonal matrix has a spectral norm that grows with the square root of the width,
    where Adam's grows with the width. The learning rate falls as much, and the weight decay rises.
    """
    parts: list[dict[str, Any]] = []
    for group in groups:
        for algorithm in ("muon", "adamw"):
            named = zip(group["names"], group["params"], strict=True)
            own = {name: p for name, p in named if takes_muon(name, p.shape) is (algorithm == "muon")}
            root = group.get("width", 1.0) ** 0.5 if algorithm == "muon" else 1.0
            scales = {"lr_scale": group["lr_scale"] * root, "weight_decay": group["weight_decay"] / root}
            if own:
                named_params = {"names": list(own), "params": list(own.values())}
                parts.append({**group, **scales, **named_params, "algorithm": algorithm})
    if not any(part["algorithm"] == "muon" for part in parts):
        raise ConfigError("--opt muon: the model has no matrix inside a block; use adamw")
    return parts
