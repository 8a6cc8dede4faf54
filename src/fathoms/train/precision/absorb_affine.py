"""Absorb per-channel gains, shifts and scales into the linears next to them, once per update.

A norm before a linear ends in gain * x + shift, a residual scale after one multiplies its output. Neither needs a
pass over the tokens: with W and c the weight and bias of the linear,

    W' = scale W gain,  c' = scale (c + W shift)

give the same outputs, and the gradients of all five follow from those of W' and c'. A branch of a block then runs
without per-channel work, and its backward pass without the sums over all tokens that such work needs.
`surgery/fold/arithmetic.py` applies the same formula to a trained model, once and in float64.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fathoms.parts.block import Block, Join
from fathoms.parts.linear import has_hooks, is_bare
from fathoms.parts.norms.norm import split_affine
from fathoms.parts.protocols import Branch, Part
from fathoms.parts.residuals.residual import RESIDUALS, ConstantScale


@dataclass(frozen=True)
class Absorbing:
    """A linear with the gain and shift of the norm before it, and the scale after it."""

    linear: nn.Linear
    gain: Tensor | None = None
    shift: Tensor | None = None
    scale: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for linears that can be stacked."""
        around = (self.linear.bias, self.gain, self.shift, self.scale)
        return self.linear.weight.shape, *(None if x is None else x.shape for x in around)


def take_factors(module: nn.Module) -> list[Absorbing]:
    """Remove gains, shifts and scales from the blocks of `module`; returns each with the linear that absorbs it.

    They stay where a hook would see the difference, and around a linear that several blocks share.
    """
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    uses = Counter(
        linear for block in blocks for _, first, last in _branches(block) for linear in (*first, last)
    )
    plain = {linear for linear, count in uses.items() if count == 1 and _is_plain(linear)}
    return [absorbing for block in blocks for absorbing in _of_block(block, plain)]


def _branches(block: Block) -> Iterator[tuple[Join, list[nn.Linear], nn.Linear]]:
    """Each join of a block, with the linears at the entry of its branch and the one at its exit."""
    for join, branch in ((block.attn_join, block.attn), (block.mlp_join, block.mlp)):
        yield join, *cast(Branch, branch).ends()


def _of_block(block: Block, plain: set[nn.Linear]) -> Iterator[Absorbing]:
    for join, first, last in _branches(block):
        if plain.issuperset(first):
            yield from _entering(join, first)
        if last in plain:
            yield from _leaving(join, last)


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a linear is only a float32 matrix and bias; Fixup's linears also shift their input."""
    return is_bare(linear) and linear.weight.dtype == torch.float32


def _entering(join: Join, linears: list[nn.Linear]) -> Iterator[Absorbing]:
    norm = cast(nn.Module, join.norm)
    if "enter" not in join.sites or join.place == "input" or has_hooks(norm):
        return
    rest, gain, shift = split_affine(norm)
    if gain is not None or shift is not None:
        join.norm = cast(Part, rest)
        for linear in linears:
            yield Absorbing(linear, gain, shift)


def _leaving(join: Join, linear: nn.Linear) -> Iterator[Absorbing]:
    scale = cast(nn.Module, join.scale)
    if "leave" in join.sites or join.place != "branch" or has_hooks(scale):
        return
    # A residual scale has one parameter, per channel or for all channels, or is a constant, or does nothing.
    own: list[Tensor] = list(scale.parameters())
    if isinstance(scale, ConstantScale):
        own = [linear.weight.new_full((1,), scale.factor)]
    if own:
        join.scale = RESIDUALS.build("none", linear.out_features)
        yield Absorbing(linear, scale=own[0])


class Stack:
    """Linears of one kind, processed together: each gets its W' and c' as parameters in `dtype`.

    >>> linear, gain = nn.Linear(2, 3), torch.tensor([2.0, 4.0])
    >>> before = linear.weight
    >>> Stack([Absorbing(linear, gain)], torch.float32).push()
    >>> torch.equal(linear.weight, before * gain)
    True
    """

    def __init__(self, absorbing: list[Absorbing], dtype: torch.dtype) -> None:
        self.linears = [each.linear for each in absorbing]
        # One list for each of the five; empty if the kind has none.
        self.weights = [linear.weight for linear in self.linears]
        self.biases = _there(linear.bias for linear in self.linears)
        self.gains = _there(each.gain for each in absorbing)
        self.shifts = _there(each.shift for each in absorbing)
        self.scales = _there(each.scale for each in absorbing)
        trained = any(parameter.requires_grad for parameter in self.parameters())
        self.adopted = False
        # The matrices at the last push, where the gradients are evaluated.
        self.wide = torch.stack([weight.detach() for weight in self.weights])
        self.narrow = torch.empty_like(self.wide, dtype=dtype)
        self.narrow_bias = self.narrow.new_zeros(self.narrow.shape[:2])
        self.weight_copies: list[nn.Parameter] = []
        self.bias_copies: list[nn.Parameter] = []
        for linear, weight, bias in zip(self.linears, self.narrow, self.narrow_bias, strict=True):
            linear.weight = nn.Parameter(weight, trained)
            self.weight_copies.append(linear.weight)
            if self.biases or self.shifts:
                linear.bias = nn.Parameter(bias, trained)
                self.bias_copies.append(linear.bias)

    def parameters(self) -> list[Tensor]:
        """The master parameters of the copies."""
        return [*self.weights, *self.biases, *self.gains, *self.shifts, *self.scales]

    def adopt_weights(self) -> None:
        """Let the weights be rows of the stack, which saves their memory, if they change right before a push alone."""
        for weight, row in zip(self.weights, self.wide, strict=True):
            weight.data = row
        self.adopted = True

    @torch.no_grad()
    def push(self) -> None:
        """Compute W' and c' from the master parameters."""
        if not self.adopted:
            torch.stack([weight.detach() for weight in self.weights], out=self.wide)
        gain, shift, scale = self._factors()
        if gain is None:
            torch.mul(self.wide, 1.0 if scale is None else scale, out=self.narrow)
        else:
            torch.mul(self.wide if scale is None else self.wide * scale, gain, out=self.narrow)
        if self.bias_copies:
            total = self._shifted(shift)
            self.narrow_bias.copy_((total if scale is None else total * scale).squeeze(2))

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each master parameter with its gradient, from the gradients of W' and c', which are cleared."""
        if all(copy.grad is None for copy in (*self.weight_copies, *self.bias_copies)):
            return
        weight = torch.stack([_gradient(copy) for copy in self.weight_copies])
        gain, shift, scale = self._factors()
        # Both as columns of a stack: (linears, out, 1).
        bias = None
        if self.bias_copies:
            bias = torch.stack([_gradient(copy) for copy in self.bias_copies]).float().unsqueeze(2)
        of_weight = weight.float() if gain is None else weight * gain
        if shift is not None and bias is not None:
            of_weight = torch.baddbmm(of_weight, bias, shift)
        if scale is not None:
            of_scale = (of_weight * self.wide).sum(2, keepdim=True)
            if bias is not None and self.biases:
                of_scale += bias * torch.stack(self.biases).unsqueeze(2)
            yield from _rows(self.scales, of_scale)
            of_weight, weight = of_weight * scale, weight * scale
            bias = None if bias is None else bias * scale
        if gain is not None:
            yield from _rows(self.gains, (weight * self.wide).sum(1, keepdim=True))
        if bias is not None and self.shifts:
            yield from _rows(self.shifts, bias.transpose(1, 2) @ self.wide)
        if bias is not None and self.biases:
            yield from _rows(self.biases, bias)
        yield from zip(self.weights, of_weight, strict=True)

    def _factors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gain and shift of each linear as rows, the scale as a column."""
        gain = torch.stack(self.gains).detach().unsqueeze(1) if self.gains else None
        shift = torch.stack(self.shifts).detach().unsqueeze(1) if self.shifts else None
        scale = torch.stack(self.scales).detach().unsqueeze(2) if self.scales else None
        return gain, shift, scale

    def _shifted(self, shift: Tensor | None) -> Tensor:
        """The bias after a shift of the input, c + W shift, as columns."""
        moved = 0.0 if shift is None else self.wide @ shift.transpose(1, 2)
        return torch.stack(self.biases).unsqueeze(2) + moved if self.biases else cast(Tensor, moved)


def _there(parts: Iterable[Tensor | None]) -> list[Tensor]:
    return [part for part in parts if part is not None]


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Take the gradient of a copy, zero if it was not used; the copy then has none."""
    gradient, parameter.grad = parameter.grad, None
    return torch.zeros_like(parameter) if gradient is None else gradient


def _rows(parameters: list[Tensor], gradients: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter with its row of a stack of gradients; a parameter for all channels gets their sum."""
    gradients = gradients.flatten(1)
    if parameters[0].numel() == 1:
        gradients = gradients.sum(1, keepdim=True)
    return zip(parameters, gradients, strict=True)
