"""Follows the residual stream through any block: which addition is a residual connection, and what it adds.

A block is ordinary Python, so its additions have no names to hook. Every call of a torch function inside a block is
looked at instead: an addition with the stream itself on one side is a residual connection, and its other side is what
the branch adds. Softmax, fused attention and activations are seen in the same way. Nothing is written into the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fathoms.probes.attention_statistics import fused_logits, multihead_logits
from fathoms.probes.tensor_statistics import DEAD_BELOW

_ADDITIONS = ("add", "add_", "__add__", "__iadd__", "__radd__")
_NORMS = ("layer_norm", "rms_norm", "group_norm")
_FUSED = "scaled_dot_product_attention"


class StreamTracer(TorchFunctionMode):
    """Reports what happens inside one foreign block at a time.

    Args:
        joined: Called with the stream, what was added and the result of each residual connection.
        attended: Called with the logits of each attention.
        activated: Called with the input and the name of each activation.
    """

    def __init__(
        self,
        joined: Callable[[Tensor, Tensor, Tensor], None],
        attended: Callable[[Tensor], None],
        activated: Callable[[Tensor, str], None],
    ) -> None:
        super().__init__()
        self.joined, self.attended, self.activated = joined, attended, activated
        self.streams: list[Tensor] | None = None

    def enter(self, inputs: tuple[Any, ...]) -> None:
        """A block begins: any of its inputs may be the stream."""
        self.streams = [x for x in inputs if isinstance(x, Tensor) and x.dim() >= 3]

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
        if name in _ADDITIONS and len(args) >= 2:
            return self._add(func, args, kwargs)
        self._look(name, args, kwargs)
        result = func(*args, **kwargs)
        if name in _NORMS and self._stream_in(args[:1]) is not None:
            # After a post-norm the stream is what the norm makes of it.
            self.streams.append(result)
        return result

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stream = self._stream_in(args[:2])
        added = None if stream is None else args[1] if stream is args[0] else args[0]
        if stream is None or not isinstance(added, Tensor) or added.shape != stream.shape:
            return func(*args, **kwargs)
        # An addition in place would change what is to be measured.
        before = stream.clone() if func.__name__ in ("add_", "__iadd__") else stream
        result = func(*args, **kwargs)
        self.joined(before, added, result)
        self.streams = [result]
        return result

    def _stream_in(self, operands: tuple[Any, ...]) -> Tensor | None:
        """The operand that is the stream, or a view of all of it."""
        for operand in operands:
            if isinstance(operand, Tensor) and any(_same(operand, stream) for stream in self.streams or ()):
                return operand
        return None

    def _look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name == _FUSED:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            self.attended(fused_logits(args[0], args[1], mask, kwargs.get("scale")))
        elif (
            name == "softmax" and isinstance(args[0], Tensor) and args[0].dim() >= 3 and args[0].shape[-1] > 1
        ):
            self.attended(args[0])
        elif name == "multi_head_attention_forward" and args[5] is not None:
            self.attended(multihead_logits(args[0], args[1], args[4], args[5], args[6]))
        elif name in DEAD_BELOW:
            self.activated(args[0], name)


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or bool(
        a.numel() == b.numel()
        and a.dtype == b.dtype
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() == b.storage_offset()
    )


def output_of(output: Any) -> Tensor | None:
    """The tensor that a block returns; many of transformers' return a tuple with it in front."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    return first if isinstance(first, Tensor) else None


def is_foreign_dyt(module: nn.Module) -> bool:
    """Whether a module is a dynamic tanh of another library."""
    return type(module).__name__ in ("DynamicTanh", "DyT") and isinstance(
        getattr(module, "alpha", None), Tensor
    )
