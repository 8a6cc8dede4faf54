"""Follows the residual stream through any block: which addition is a residual connection, and what it adds.

A block is ordinary Python, so its additions have no names to hook. Every call of a torch function inside a block is
looked at instead: an addition with the stream itself on one side is a residual connection, and its other side is what
the branch adds. Softmax, fused attention and activations are seen in the same way. Nothing is written into the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fathoms.probes.attention_statistics import fused_logits, multihead_logits
from fathoms.probes.tensor_statistics import DEAD_BELOW

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
        """The block has ended."""
        self.streams = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Look at a call, and make it."""
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
