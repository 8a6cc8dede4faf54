"""torch.compile with its caches, and CUDA graphs: the same numbers with fewer launches."""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn

from fathoms.errors import ConfigError, reason
from fathoms.files import cache_folder
from fathoms.registry import check_name
from fathoms.training.master_weights import add_gradients

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own variable; where it is set, it holds."""


def compile_cache() -> Path:
    """The folder of the compile caches: torch's variable, or fathoms/inductor in the user's cache folder."""
    given = os.environ.get(CACHE)
    return Path(given) if given else cache_folder("inductor")


def keep_compiled_code() -> None:
    """Let torch keep what it compiles for the next run, with a warning if the folder cannot be written.

    Equal blocks share one entry, and so do equal models of other runs.
    """
    folder = compile_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        warnings.warn(f"{folder}: compiled code is not kept there ({error.strerror})", stacklevel=2)
        return
    os.environ[CACHE] = str(folder)


def compile_repeatably() -> None:
    """Choose kernels by rules and not by timing them, where torch can, so that the machine's load decides nothing.

    A process-wide switch of torch, read when something is compiled. TORCHINDUCTOR_DETERMINISTIC=0 leaves it off.
    """
    import torch._inductor.config

    if "TORCHINDUCTOR_DETERMINISTIC" not in os.environ:
        torch._inductor.config.deterministic = True


KEEPS = ("all", "lean")
DEFAULT_BACKEND = "inductor"


def check_backend(name: str) -> str:
    """Return the name of a backend of torch.compile; an unknown one is an error."""
    # Listing them imports them all, which takes a second or more.
    if name == DEFAULT_BACKEND:
        return name
    return check_name(name, torch._dynamo.list_backends(None), "backend", "--torchcompile")


def prepare_compiler() -> None:
    """Import torch's compiler, which takes seconds, and set it up for this process: its caches, rules and savings."""
    keep_compiled_code()
    compile_repeatably()
    keep_lean()
    hide_advice()
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401


def hide_advice() -> None:
    """Hide torch's advice to compute float32 products in TensorFloat32: here float32 is float32."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compile every block of a model in place; blocks that differ only in their weights share one compilation."""
    stacks = [part for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    blocks = [part for stack in stacks for part in stack if "Block" in type(part).__name__]
    if not blocks:
        raise ConfigError("--torchcompile: the model has no list of blocks; use none")
    # Blocks that differ in more, such as their drop-path, each need their own compilation, and torch gives up after
    # eight. The limit holds for the process and is only ever raised: blocks are compiled at their first call, long
    # after this returns, and a higher limit changes nothing for other code but when torch would give up.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 2 * len(blocks) + 8)
    for block in blocks:
        block.compile(**options)


def kept_for_backward(keep: str) -> AbstractContextManager[None]:
    """Set what code compiled in this context saves for the backward pass: "all" that torch would, or "lean".

    "lean" recomputes element-wise results, such as norms and activations, instead of saving them.
    """
    check_name(keep, KEEPS, "amount", "--keep")
    return torch._functorch.config.patch(ban_recompute_materialized_backward=keep == "all")


def keep_lean() -> None:
    """Make everything compiled from now on in this process save little for the backward pass.

    It is a process-wide switch, since a model is compiled at its first call, long after this returns, and again for
    each new shape. `kept_for_backward("all")` takes it back for what is compiled inside.
    """
    torch._functorch.config.ban_recompute_materialized_backward = False


# Eager calls before the first capture: they compile, choose kernels and allocate workspaces.
WARMUP = 3
Compute = Callable[..., tuple[Tensor, ...]]


class CaptureError(Exception):
    """A capture failed; the message says why. The device and its generator are as before it."""


@dataclass
class _Capture:
    """A captured graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: list[Tensor | None]


class GraphedStep:
    """Run `compute`, which ends in a backward pass, as a replayed CUDA graph.

    The first calls with inputs of some layout (shape, dtype and strides) run eagerly; then the work is captured with
    static tensors of that layout, into which each call copies its inputs. Random numbers follow the generator, as
    outside of a graph. Where the capture fails, all calls run eagerly from then on, with the same numbers.

    Args:
        compute: Takes tensors, sets or adds to the gradients of `parameters`, returns tensors without gradient.
        parameters: The parameters that `compute` gives gradients to.
        warn: Takes the line about a capture that failed.
    """

    def __init__(
        self,
        compute: Compute,
        parameters: Iterable[nn.Parameter],
        warn: Callable[[str], object] = warnings.warn,
    ) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("--launch graph: needs a CUDA device; use eager")
        self.compute, self.warn = compute, warn
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.calls: Counter[Any] = Counter()
        self.captures: dict[Any, _Capture] = {}
        self.failed = False

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The outputs, which the next call overwrites."""
        layout = tuple((x.shape, x.dtype, x.stride()) for x in inputs)
        self.calls[layout] += 1
        if self.failed or self.calls[layout] <= WARMUP:
            return self.compute(*inputs)
        waiting = [parameter.grad for parameter in self.parameters]
        if layout not in self.captures:
            try:
                self.captures[layout] = self._capture(inputs)
            except CaptureError as error:
                self._give_up(error, waiting)
                return self.compute(*inputs)
        captured = self.captures[layout]
        for static, given in zip(captured.inputs, inputs, strict=True):
            static.copy_(given)
        # Gradients of earlier batches may be in the graph's own tensors, which the replay overwrites.
        waiting = [None if gradient is None else gradient.clone() for gradient in waiting]
        captured.graph.replay()
        for parameter, gradient in zip(self.parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        pairs = zip(self.parameters, waiting, strict=True)
        add_gradients((parameter, gradient) for parameter, gradient in pairs if gradient is not None)
        return captured.outputs

    def _give_up(self, error: CaptureError, waiting: list[Tensor | None]) -> None:
        self.failed = True
        self.captures.clear()
        for parameter, gradient in zip(self.parameters, waiting, strict=True):
            parameter.grad = gradient
        self.warn(f"no CUDA graph, kernels are launched one by one: the capture failed ({error})")

    def _capture(self, inputs: tuple[Tensor, ...]) -> _Capture:
        static = tuple(same_layout(x) for x in inputs)
        for parameter in self.parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        stream, before = torch.cuda.current_stream(), generator.clone_state()
        try:
            # Threads that load data or save may call the device; only this one is held to a capture's rules.
            with refusing_to_compile(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = self.compute(*static)
        except RuntimeError as error:
            # A failed capture leaves its stream current, and the generator counting for the graph.
            torch.cuda.set_stream(stream)
            generator.graphsafe_set_state(before)
            first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            raise CaptureError(reason(first)) from error
        return _Capture(graph, static, outputs, [parameter.grad for parameter in self.parameters])


def same_layout(x: Tensor) -> Tensor:
    """A copy of a tensor with its strides, also where they leave gaps, as those of some channels of an image do."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def refusing_to_compile() -> AbstractContextManager[object]:
    """Raise where code would be compiled, which synchronises, and a capture does not survive that."""
    # Where nothing has been compiled, the compiler is not imported for this.
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")
