"""Signal propagation through the depth: activations forward, gradients backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fathoms.errors import ConfigError
from fathoms.models.hooks import hooked
from fathoms.models.inference_mode import in_inference
from fathoms.parts.block import Block, Join
from fathoms.text_table import aligned


@dataclass(frozen=True)
class Site:
    """One branch of one block.

    Args:
        block: Name of the block, such as "blocks.3".
        branch: "attn" or "mlp".
        stream: Root mean square of the residual stream that the branch is added to.
        added: Root mean square of the branch's output, norm and scale included.
        ratio: `added` over `stream`.
        gradient: Norm of the loss's gradient on the stream after the addition.
        weights: Norm of the loss's gradient on the parameters of the branch.
    """

    block: str
    branch: str
    stream: float
    added: float
    ratio: float
    gradient: float
    weights: float


class Signal(list[Site]):
    """The sites of a model from the first block to the last."""

    @property
    def growth(self) -> float:
        """Ratio of the stream at the last site to that at the first."""
        return _quotient(self[-1].stream, self[0].stream)

    @property
    def gradient_ratio(self) -> float:
        """Gradient at the first site over gradient at the last: near 0 it vanishes, far above 1 it explodes."""
        return _quotient(self[0].gradient, self[-1].gradient)

    def to_json(self) -> dict[str, Any]:
        """All sites and the two summaries as plain values; JSON has no infinity, so None stands for it."""
        return {
            "growth": _finite(self.growth),
            "gradient_ratio": _finite(self.gradient_ratio),
            "sites": [{name: _finite(value) for name, value in asdict(site).items()} for site in self],
        }

    def table(self) -> str:
        """One line per site, for a terminal."""
        columns = ("stream", "added", "ratio", "gradient", "weights")
        rows = [
            (site.block, site.branch, *(f"{getattr(site, column):.3g}" for column in columns))
            for site in self
        ]
        return aligned(("block", "branch", *columns), rows)


def _quotient(a: float, b: float) -> float:
    """The quotient; NaN for 0 / 0, infinity for x / 0."""
    return a / b if b else math.nan if a == 0.0 else math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rms(x: Tensor) -> float:
    return x.detach().float().square().mean().sqrt().item()


def _norm(tensors: Sequence[Tensor | None]) -> float:
    return math.hypot(*(tensor.float().norm().item() for tensor in tensors if tensor is not None))


def _record(join: Join, seen: dict[str, Tensor]) -> list[RemovableHandle]:
    """Hooks that record the stream, the branch's output and the gradient at a join."""

    def keep_added(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen["added"] = output.detach()

    def keep_stream(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["stream"] = inputs[0].detach()
        output.register_hook(lambda gradient: seen.__setitem__("gradient", gradient.detach()))

    return [join.drop_path.register_forward_hook(keep_added), join.register_forward_hook(keep_stream)]


def probe(
    model: nn.Module, images: Float[Tensor, "B C H W"], labels: Int[Tensor, " B"] | None = None
) -> Signal:
    """Run one batch forward and backward, and measure the signal at every branch.

    The model is left unchanged: its mode, its parameters and their gradients.

    Args:
        model: A fathoms model, or any module that contains fathoms blocks.
        images: A batch.
        labels: Its classes; None draws them at random with a fixed seed.

    >>> from fathoms import ViT, ViTConfig
    >>> vit = ViT(ViTConfig(image_size=8, patch_size=2, dim=32, heads=2, depth=4, num_classes=10))
    >>> signal = probe(vit, torch.randn(8, 3, 8, 8))
    >>> [site.branch for site in signal[:2]]
    ['attn', 'mlp']
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    if not blocks:
        raise ConfigError(f"probe: {type(model).__name__} has no fathoms blocks; give a fathoms model")
    seen: dict[tuple[str, str], dict[str, Tensor]] = {}
    hooks: list[RemovableHandle] = []
    for name, block in blocks.items():
        for branch, join in (("attn", block.attn_join), ("mlp", block.mlp_join)):
            hooks += _record(join, seen.setdefault((name, branch), {}))
    kept = [parameter.grad for parameter in model.parameters()]
    try:
        with hooked(*hooks):
            _backward(model, images, labels)
        return Signal(_site(name, branch, blocks[name], seen[name, branch]) for name, branch in seen)
    finally:
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient


def _backward(model: nn.Module, images: Tensor, labels: Tensor | None) -> None:
    """Gradients of one batch, in evaluation mode so that drop-path adds no noise."""
    model.zero_grad(set_to_none=True)
    with in_inference(model), torch.enable_grad():
        logits = model(images)
        if labels is None:
            generator = torch.Generator().manual_seed(0)
            labels = torch.randint(logits.shape[1], (len(logits),), generator=generator).to(logits.device)
        F.cross_entropy(logits.float(), labels).backward()


def _site(name: str, branch: str, block: Block, seen: dict[str, Tensor]) -> Site:
    stream, added = _rms(seen["stream"]), _rms(seen["added"])
    parts = (block.attn_join, block.attn) if branch == "attn" else (block.mlp_join, block.mlp)
    weights = _norm([p.grad for part in parts for p in part.parameters()])
    ratio = _quotient(added, stream)
    return Site(name, branch, stream, added, ratio, _norm([seen.get("gradient")]), weights)
