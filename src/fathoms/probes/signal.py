"""How the signal fares on its way through the depth: forward, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fathoms.errors import ConfigError
from fathoms.models.inference_mode import in_inference
from fathoms.parts.block import Block, Join


@dataclass(frozen=True)
class Site:
    """One branch of one block.

    Args:
        block: Name of the block, such as "blocks.3".
        branch: "attn" or "mlp".
        stream: Root mean square of the stream that the branch is added to.
        added: Root mean square of what is added, norm and scale included.
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
        """How many times larger the stream is at the last site than at the first."""
        return _quotient(self[-1].stream, self[0].stream)

    @property
    def gradient_ratio(self) -> float:
        """Gradient at the first site over gradient at the last: 1 is even, 0 vanishes, large explodes."""
        return _quotient(self[0].gradient, self[-1].gradient)

    def to_json(self) -> dict[str, Any]:
        """All sites and the two summaries as plain values; JSON has no infinity, so None stands for it."""
        return {
            "growth": _finite(self.growth),
            "gradient_ratio": _finite(self.gradient_ratio),
            "sites": [{name: _finite(value) for name, value in asdict(site).items()} for site in self],
        }

    def table(self) -> str:
        """One line a site, for a terminal."""
        columns = ("stream", "added", "ratio", "gradient", "weights")
        lines = [f"{'block':<18}{'branch':<8}" + "".join(f"{column:>10}" for column in columns)]
        for site in self:
            numbers = "".join(f"{getattr(site, column):>10.3g}" for column in columns)
            lines.append(f"{site.block:<18}{site.branch:<8}{numbers}")
        return "\n".join(lines)


def _quotient(a: float, b: float) -> float:
    """The quotient, which nothing over nothing leaves undefined."""
    return a / b if b else math.nan if a == 0.0 else math.inf


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rms(x: Tensor) -> float:
    return x.detach().float().square().mean().sqrt().item()


def _norm(tensors: Sequence[Tensor | None]) -> float:
    return math.hypot(*(tensor.float().norm().item() for tensor in tensors if tensor is not None))


def _watch(join: Join, seen: dict[str, Tensor]) -> list[Any]:
    """Hooks that keep what flows through a join."""

    def keep_added(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen["added"] = output.detach()

    def keep_stream(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen["stream"] = inputs[0].detach()
        output.register_hook(lambda gradient: seen.__setitem__("gradient", gradient.detach()))

    return [join.drop_path.register_forward_hook(keep_added), join.register_forward_hook(keep_stream)]


def probe(
    model: nn.Module, images: Float[Tensor, "B C H W"], labels: Int[Tensor, " B"] | None = None
) -> Signal:
    """Send one batch through a model and its loss back, and measure every branch on the way.

    The model is left as it was: its mode, its parameters and their gradients.

    Args:
        model: A fathoms model, or any module with fathoms blocks inside.
        images: A batch.
        labels: Its classes; without them, classes drawn at random from a fixed seed.

    >>> from fathoms import ViT, ViTConfig
    >>> vit = ViT(ViTConfig(image_size=8, patch_size=2, dim=32, heads=2, depth=4, num_classes=10))
    >>> signal = probe(vit, torch.randn(8, 3, 8, 8))
    >>> [site.branch for site in signal[:2]]
    ['attn', 'mlp']
    """
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    if not blocks:
        raise ConfigError(f"probe: {type(model).__name__} has no fathoms blocks inside; give a fathoms model")
    seen: dict[tuple[str, str], dict[str, Tensor]] = {}
    hooks: list[Any] = []
    for name, block in blocks.items():
        for branch, join in (("attn", block.attn_join), ("mlp", block.mlp_join)):
            hooks += _watch(join, seen.setdefault((name, branch), {}))
    kept = [parameter.grad for parameter in model.parameters()]
    try:
        _backward(model, images, labels)
        return Signal(_site(name, branch, blocks[name], seen[name, branch]) for name, branch in seen)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient


def _backward(model: nn.Module, images: Tensor, labels: Tensor | None) -> None:
    """One step's gradients, in evaluation mode so that drop-path does not blur the measure."""
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
