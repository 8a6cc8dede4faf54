"""Swap the norms of a timm model, then fold what is left into its matrices.

You learn three functions that take any model: `swap_norms` replaces its LayerNorms by LearnableScaler (y = a * x + b,
no statistics) and fits each to the output of the norm it replaces; `fold` moves every scale and shift into the linear
next to it and compares the outputs before and after. What is left is a Transformer without a single norm.

    pip install '.[timm]'
    python examples/swap_and_fold.py
"""

import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import fathoms
from fathoms.parts import LearnableScaler


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The handwritten digits, enlarged to 16 pixels."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 8 - 1
    return F.interpolate(images, size=16, mode="bilinear"), torch.tensor(labels)


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor, epochs: int, lr: float) -> None:
    """A plain training loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in torch.randperm(len(images)).split(50):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> str:
    """The share of the images that a model recognises."""
    return f"{(model.eval()(images).argmax(1) == labels).float().mean().item():.1%} right"


def norms(model: nn.Module) -> int:
    """Modules that normalise, or that stand in for one that did."""
    return sum(isinstance(module, nn.LayerNorm | LearnableScaler) for module in model.modules())


if __name__ == "__main__":
    torch.manual_seed(0)
    images, labels = digits()
    seen, held_out = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])

    small = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 4}
    model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **small)
    train(model, *seen, epochs=8, lr=2e-3)
    print(f"timm's ViT, {norms(model)} LayerNorms: {accuracy(model, *held_out)}")

    report = fathoms.swap_norms(model, "learnable_scaler", calibrate=seen[0][:200].split(50))
    print(f"{len(report)} swapped and calibrated: {accuracy(model, *held_out)}")
    train(model.train(), *seen, epochs=2, lr=5e-4)
    print(f"two epochs later: {accuracy(model, *held_out)}")

    folded, report = fathoms.fold(model)
    print(f"{len(report)} scales folded, {norms(folded)} norms left: {accuracy(folded, *held_out)}")
    print(f"the output moved by {report.difference:.1e} of its largest value")
