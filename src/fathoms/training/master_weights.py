"""The bfloat16 compute model of float32 master weights, cast once per update, its blocks without per-channel work.

A norm before a linear ends in gain * x + shift, a residual scale after one multiplies its output. Neither needs a
pass over the tokens: with W and c the weight and bias of the linear,

    W' = scale W gain,  c' = scale (c + W shift)

give the same outputs, and the gradients of all five follow from those of W' and c'. A branch of a block then runs
without per-channel work, and its backward pass without the sums over all tokens that such work needs.
`surgery/fold_absorb.py` applies the same formula to a trained model, once and in float64.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fathoms.parts.block import Block, Join
from fathoms.parts.linears import has_hooks, is_bare, is_exact_gelu
from fathoms.parts.mlp import BiasedGelu, GeluMLP
from fathoms.parts.norms import split_affine
from fathoms.parts.protocols import Branch, Part
from fathoms.parts.residuals import RESIDUALS, ConstantScale


def add_gradients(given: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set the gradients of parameters, or add to those they have; parameters that need none are skipped."""
    # A parameter may come more than once. A multi-tensor addition runs all pairs at once, and would lose one of two
    # that add to the same tensor, so each parameter is in the list once.
    sums: dict[Tensor, Tensor] = {}
    for parameter, gradient in given:
        if parameter.requires_grad:
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
    old, new = [], []
    for parameter, gradient in sums.items():
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            old.append(parameter.grad)
            new.append(gradient)
    if old:
        torch._foreach_add_(old, new)


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
    plain = {cast(nn.Linear, linear) for linear, count in uses.items() if count == 1 and _is_plain(linear)}
    return [absorbing for block in blocks for absorbing in _of_block(block, plain)]


def _branches(block: Block) -> Iterator[tuple[Join, list[nn.Module], nn.Module]]:
    """Each join of a block, with the linears at the entry of its branch and the one at its exit."""
    for join, branch in ((block.attn_join, block.attn), (block.mlp_join, block.mlp)):
        yield join, *cast(Branch, branch).ends()


def _of_block(block: Block, plain: set[nn.Linear]) -> Iterator[Absorbing]:
    for join, first, last in _branches(block):
        if plain.issuperset(first):
            yield from _entering(join, cast(list[nn.Linear], first))
        if last in plain:
            yield from _leaving(join, cast(nn.Linear, last))


def _is_plain(linear: nn.Module) -> bool:
    """Whether a linear is only a float32 matrix and bias; Fixup's linears also shift their input."""
    return is_bare(linear) and cast(nn.Linear, linear).weight.dtype == torch.float32


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

    @torch.no_grad()
    def push(self) -> None:
        """Compute W' and c' from the master parameters."""
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


class ComputeCopy:
    """A compute model: a copy of `model` whose linears and convolutions hold bfloat16 copies of its weights.

    In its blocks the gain and shift of norms and the residual scales are part of those matrices (see
    `absorb_affine`), and GELUs add the bias of the linear before them. All other parameters and all buffers are the
    model's own tensors. Run `module` forward and backward; call `pull_gradients` before the optimizer updates the
    model's parameters, the master weights, and `push_weights` after it. None of this is state: the copies follow
    from the master weights.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    >>> copies = ComputeCopy(model)
    >>> copies.module[0].weight.dtype, copies.module[1].weight is model[1].weight
    (torch.bfloat16, True)
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        shared: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
        self.module = copy.deepcopy(model, shared)
        kinds: dict[object, list[Absorbing]] = defaultdict(list)
        for absorbing in take_factors(self.module):
            kinds[absorbing.kind].append(absorbing)
        self.stacks = [Stack(alike, dtype) for alike in kinds.values()]
        self.masters: list[Tensor] = []
        self.copies: list[Tensor] = []
        done = {linear for stack in self.stacks for linear in stack.linears}
        self._copy([part for part in self.module.modules() if part not in done], dtype)
        _move_biases(self.module)
        self.push_weights()

    def _copy(self, parts: list[nn.Module], dtype: torch.dtype) -> None:
        """Replace the float32 weights and biases of linears and convolutions by copies."""
        made: dict[int, nn.Parameter] = {}
        for part in parts:
            if not isinstance(part, nn.Linear | nn.modules.conv._ConvNd):
                continue
            for name, own in part.named_parameters(recurse=False):
                if own.dtype != torch.float32:
                    continue
                if id(own) not in made:
                    made[id(own)] = nn.Parameter(own.detach().to(dtype), requires_grad=own.requires_grad)
                    self.masters.append(own)
                    self.copies.append(made[id(own)])
                part.register_parameter(name, made[id(own)])

    @torch.no_grad()
    def pull_gradients(self) -> None:
        """Move the gradients of the copies to the master weights, in float32."""
        given = [(m, c.grad) for m, c in zip(self.masters, self.copies, strict=True) if c.grad is not None]
        wide = [torch.empty_like(master) for master, _ in given]
        if given:
            torch._foreach_copy_(wide, [grad for _, grad in given])
        add_gradients(zip([master for master, _ in given], wide, strict=True))
        for low in self.copies:
            low.grad = None
        for stack in self.stacks:
            add_gradients(stack.gradients())

    @torch.no_grad()
    def push_weights(self) -> None:
        """Cast the master weights into the copies, in one pass."""
        if self.copies:
            torch._foreach_copy_(self.copies, self.masters)
        for stack in self.stacks:
            stack.push()


def _move_biases(module: nn.Module) -> None:
    """Let GELUs add the bias of the linear before them, except for a linear that several MLPs share."""
    mlps = [part for part in module.modules() if isinstance(part, GeluMLP)]
    uses = Counter(mlp.fc1 for mlp in mlps)
    for mlp in mlps:
        if uses[mlp.fc1] == 1 and is_bare(mlp.fc1) and is_exact_gelu(mlp.act):
            mlp.act = BiasedGelu(mlp.fc1.bias)
            mlp.fc1.register_parameter("bias", None)
