"""Records every residual connection of a model while a batch runs forward and backward.

A foreign block is ordinary Python, whose additions have no names to hook. Every call of a torch function inside it
is looked at instead: an addition with the stream itself on one side is a residual connection, its other side what
the branch adds. Softmax, fused attention and activations are seen in the same way. Nothing is written into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from fathoms.parts.attention import ClassAttention, SelfAttention
from fathoms.parts.block import Block
from fathoms.parts.mlp import BiasedGelu
from fathoms.parts.norms import Derf, DyT
from fathoms.probes.tensor_statistics import (
    DEAD_BELOW,
    Values,
    attention_statistics,
    dead_share,
    fused_logits,
    join_statistics,
    largest,
    multihead_logits,
    norm,
    own_logits,
    rms,
    saturated_share,
    token_statistics,
)

_ADDITIONS = ("add", "add_", "__add__", "__iadd__", "__radd__", "lerp", "lerp_")
_IN_PLACE = ("add_", "__iadd__", "lerp_")
_COPIES = ("clone", "contiguous")
_NORMS = ("layer_norm", "rms_norm", "group_norm")
_FUSED = "scaled_dot_product_attention"


class StreamTracer(TorchFunctionMode):
    """Reports what happens inside one foreign block at a time.

    Args:
        joined: Called with the stream, what was added, the result and the skip of each residual connection; the skip
            is the stream, or the multiple of it that the addition takes.
        attended: Called with the logits of each attention.
        activated: Called with the input and the name of each activation.
    """

    def __init__(
        self,
        joined: Callable[[Tensor, Tensor, Tensor, Tensor], None],
        attended: Callable[[Tensor], None],
        activated: Callable[[Tensor, str], None],
    ) -> None:
        super().__init__()
        self.joined, self.attended, self.activated = joined, attended, activated
        self.streams: list[Tensor] | None = None

    def enter(self, inputs: tuple[Any, ...]) -> None:
        """A block begins: any of its inputs may be the stream."""
        flat = [x for given in inputs for x in (given if isinstance(given, tuple | list) else (given,))]
        self.streams = [x for x in flat if isinstance(x, Tensor) and x.dim() >= 3]

    def leave(self) -> None:
        self.streams = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.streams is None:
            return func(*args, **kwargs)
        if name in _ADDITIONS:
            return self._add(func, args, kwargs)
        self._look(name, args, kwargs)
        result = func(*args, **kwargs)
        if name in _NORMS + _COPIES and self._stream_in(_given(args, kwargs, input=0)) is not None:
            # After a post-norm the stream is what the norm makes of it.
            self.streams.append(result)
        return result

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first, second, weights = _terms(func.__name__, args, kwargs)
        stream = self._stream_in((first, second))
        if stream is None or weights is None or not _alike(first, second):
            return func(*args, **kwargs)
        swapped = stream is not first
        # An addition in place would change what is to be measured.
        first = first.detach().clone() if func.__name__ in _IN_PLACE else first
        result = func(*args, **kwargs)
        terms = [x if w == 1 else x.detach() * w for x, w in zip((first, second), weights, strict=True)]
        if swapped:
            self.joined(second, terms[0], result, terms[1])
        else:
            self.joined(first, terms[1], result, terms[0])
        self.streams = [result]
        return result

    def _stream_in(self, operands: Sequence[Any]) -> Tensor | None:
        """The operand that is the stream, or a view of all of it."""
        for operand in operands:
            if isinstance(operand, Tensor) and any(_same(operand, stream) for stream in self.streams or ()):
                return operand
        return None

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == _FUSED:
            q, k, mask = _given(args, kwargs, query=0, key=1, attn_mask=3)
            self.attended(fused_logits(q, k, mask, kwargs.get("scale")))
        elif name == "softmax":
            (logits,) = _given(args, kwargs, input=0)
            if isinstance(logits, Tensor) and logits.dim() >= 3 and logits.shape[-1] > 1:
                self.attended(logits)
        elif name == "multi_head_attention_forward":
            q, k, heads, weight, bias = _given(
                args, kwargs, query=0, key=1, num_heads=4, in_proj_weight=5, in_proj_bias=6
            )
            if weight is not None:
                self.attended(multihead_logits(q, k, heads, weight, bias))
        elif name in DEAD_BELOW:
            (x,) = _given(args, kwargs, input=0)
            self.activated(x, name)


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], **places: int) -> list[Any]:
    """Arguments of a call by place or by name, whichever it uses; None for one that it leaves out."""
    return [args[place] if place < len(args) else kwargs.get(name) for name, place in places.items()]


def _terms(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any, tuple[float, float] | None]:
    """Both operands of a sum and the numbers they are multiplied by; None where those are not plain numbers."""
    lerp = name.startswith("lerp")
    named = [kwargs[key] for key in ("input", "end" if lerp else "other") if key in kwargs]
    first, second, *more = (*args[:2], *named, *args[2:], None, None)
    weight = kwargs.get("weight", more[0]) if lerp else kwargs.get("alpha", 1)
    if not isinstance(weight, int | float):
        return first, second, None
    return first, second, (1 - weight if lerp else 1, weight)


def _alike(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or bool(
        a.numel() == b.numel()
        and a.dtype == b.dtype
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
    )


def output_of(output: Any) -> Tensor | None:
    """The tensor that a block takes or returns; many of transformers' return a tuple with it in front."""
    while isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def is_foreign_dyt(module: nn.Module) -> bool:
    """Whether a module is a dynamic tanh of another library."""
    return type(module).__name__ in ("DynamicTanh", "DyT") and isinstance(
        getattr(module, "alpha", None), Tensor
    )


Hook = Callable[..., Any]

# The branch that a statistic belongs to.
_TOLD_BY = {"logit": "attention", "hidden_max": "MLP"}


class Recorder:
    """Statistics by (block, branch), each a tensor on the model's device until `read`.

    Args:
        model: The model that will run.
        blocks: Its blocks by name.
        light: Leave out what looks at every pair of tokens: entropy, logits and distance of attention.
    """

    def __init__(self, model: nn.Module, blocks: dict[str, nn.Module], light: bool = False) -> None:
        self.model, self.blocks, self.light = model, blocks, light
        self.sites: dict[tuple[str, str], Values] = {}
        self.pending: Values = {}
        self.unseen: list[str] = []
        self.recording = True
        self.first_layer: tuple[str, nn.Module] | None = None
        self.block = ""
        self.prefix = _prefix_tokens(model)
        self.tracer = StreamTracer(self._join_foreign, self._attended, self._activated)

    def install(self) -> list[RemovableHandle]:
        inside = {module for block in self.blocks.values() for module in block.modules()}
        handles = [
            module.register_forward_pre_hook(self._runner(name))
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) and module not in inside
        ]
        for name, block in self.blocks.items():
            handles.append(block.register_forward_pre_hook(self._opener(name), with_kwargs=True))
            handles.append(block.register_forward_hook(self._closer(name)))
            for module in block.modules():
                handles += self._watch(module)
            if isinstance(block, Block):
                for branch, join in (("attn", block.attn_join), ("mlp", block.mlp_join)):
                    handles += self._watch_join(name, branch, join)
        return handles

    def stop(self) -> None:
        """The forward pass is over; a block that is computed again for the backward pass is not measured again."""
        self.recording = False

    def read(self) -> dict[tuple[str, str], dict[str, float]]:
        """All numbers, fetched from the device in one transfer."""
        places = [(site, name) for site, values in self.sites.items() for name in values]
        numbers = [self.sites[site][name].double() for site, name in places]
        found: dict[tuple[str, str], dict[str, float]] = {site: {} for site in self.sites}
        for (site, name), number in zip(
            places, torch.stack(numbers).tolist() if numbers else [], strict=True
        ):
            found[site][name] = number
        return found

    def _runner(self, name: str) -> Hook:
        def runs(layer: nn.Module, _inputs: Any) -> None:
            # Before the first block, a layer is of the stem.
            if self.first_layer is None and not self.block:
                self.first_layer = (name, layer)

        return runs

    def _opener(self, name: str) -> Hook:
        def opened(block: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
            if self.recording:
                self.block, self.pending = name, {}
                if not isinstance(block, Block):
                    self.tracer.enter((*inputs, *named.values()))

        return opened

    def _closer(self, name: str) -> Hook:
        def closed(_block: nn.Module, inputs: Any, output: Any) -> None:
            if not self.recording:
                return
            self.tracer.leave()
            stream, after = output_of(inputs), output_of(output)
            if any(block == name for block, _ in self.sites):
                # These statistics are of a branch that no addition has taken.
                left = [branch for key, branch in _TOLD_BY.items() if key in self.pending]
                self.unseen += [f"{name}: the addition of its {branch} was not seen" for branch in left]
                return
            # No residual connection was seen, as in a block that is one kernel: its own is measured.
            if stream is not None and after is not None and after.shape == stream.shape:
                self.unseen.append(f"{name}: no addition was seen; its row is of the whole block")
                self._joined((name, "block"), stream, after.detach() - stream.detach(), after)
            else:
                self.unseen.append(f"{name}: no addition was seen, and it has no row")

        return closed

    def _watch_join(self, name: str, branch: str, join: nn.Module) -> list[RemovableHandle]:
        seen: dict[str, Tensor] = {}

        def keeper(term: str) -> Hook:
            def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
                seen[term] = output.detach()

            return keep

        def keep_join(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if self.recording and len(inputs) > 1:
                self._joined((name, branch), inputs[0], seen.pop("added"), output, seen.pop("skip"))

        drop_path: Any = join.drop_path
        enlarge: Any = join.enlarge
        return [
            drop_path.register_forward_hook(keeper("added")),
            enlarge.register_forward_hook(keeper("skip")),
            join.register_forward_hook(keep_join),
        ]

    def _watch(self, module: nn.Module) -> list[RemovableHandle]:
        """Hooks on the modules whose inside no torch function shows."""
        if isinstance(module, SelfAttention | ClassAttention):
            return [module.register_forward_pre_hook(self._look_at_attention)]
        if isinstance(module, DyT | Derf) or is_foreign_dyt(module):
            return [module.register_forward_pre_hook(self._look_at_curve)]
        if isinstance(module, BiasedGelu):
            return [module.register_forward_pre_hook(self._look_at_gelu)]
        if isinstance(module, nn.GELU):
            return [module.register_forward_pre_hook(lambda _m, inputs: self._activated(inputs[0], "gelu"))]
        if isinstance(module, nn.SiLU):
            return [module.register_forward_pre_hook(lambda _m, inputs: self._activated(inputs[0], "silu"))]
        return []

    @torch.no_grad()
    def _look_at_attention(self, module: Any, inputs: tuple[Any, ...]) -> None:
        if self.recording and not self.light:
            self._attended(own_logits(module, inputs))

    @torch.no_grad()
    def _look_at_curve(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        shift = getattr(module, "shift", None)
        if self.recording:
            curve = inputs[0].detach() * module.alpha
            self.pending["saturated"] = saturated_share(curve if shift is None else curve + shift)

    @torch.no_grad()
    def _look_at_gelu(self, module: BiasedGelu, inputs: tuple[Tensor, ...]) -> None:
        self._activated(inputs[0] + module.bias, "gelu")

    @torch.no_grad()
    def _attended(self, logits: Tensor) -> None:
        if self.recording and not self.light:
            with torch.autocast(logits.device.type, enabled=False):
                self.pending |= attention_statistics(logits, self.prefix)

    @torch.no_grad()
    def _activated(self, x: Tensor, kind: str) -> None:
        if self.recording:
            self.pending |= {"dead": dead_share(x, kind), "hidden_max": largest(x)}

    def _join_foreign(self, stream: Tensor, added: Tensor, output: Tensor, skip: Tensor) -> None:
        branch = "attn" if "logit" in self.pending or not self._has(self.block, "attn") else "mlp"
        if self._has(self.block, branch):
            count = sum(block == self.block for block, _ in self.sites)
            branch = f"{branch}{count}"
        self._joined((self.block, branch), stream, added, output, skip)

    def _has(self, block: str, branch: str) -> bool:
        return (block, branch) in self.sites

    def _joined(
        self, site: tuple[str, str], stream: Tensor, added: Tensor, output: Tensor, skip: Tensor | None = None
    ) -> None:
        with torch.no_grad(), torch.autocast(stream.device.type, enabled=False):
            values = join_statistics(stream, added, skip) | token_statistics(output)
        values |= self.pending
        self.pending = {}
        sizes = [
            values[name] for name in ("stream_max", "added_max", "hidden_max", "logit") if name in values
        ]
        values["largest"] = torch.stack([size.double() for size in sizes]).max()
        self.sites[site] = values

        @torch.no_grad()
        def keep_gradient(gradient: Tensor) -> None:
            values.update(gradient=norm(gradient), gradient_rms=rms(gradient))

        if output.requires_grad:
            output.register_hook(keep_gradient)


def _prefix_tokens(model: nn.Module) -> int | None:
    """Tokens in front of the patches, where the model says so."""
    count = getattr(model, "num_prefix_tokens", None)
    return count if isinstance(count, int) else None
