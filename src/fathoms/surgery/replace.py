"""Replace one module by another, under every name that it has."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> list[str]:
    """Replace `old` by `new` everywhere in `model`; a shared module stays shared. Returns the paths."""
    paths = []
    for path, parent in list(model.named_modules(remove_duplicate=True)):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new
                paths.append(f"{path}.{name}" if path else name)
    return paths


class ChannelsFirst(nn.Module):
    """A channels-last norm applied to tensors whose channels are the second axis."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Float[Tensor, "B C *map"]) -> Float[Tensor, "B C *map"]:
        """Move the channels to the end, normalise, move them back."""
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class ThenActivation(nn.Module):
    """A norm followed by the activation of the module it replaces, for timm's fused norms."""

    def __init__(self, norm: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.act = activation

    def forward(self, x: Float[Tensor, "B C *map"]) -> Float[Tensor, "B C *map"]:
        """Normalise, then apply the activation."""
        return self.act(self.norm(x))
