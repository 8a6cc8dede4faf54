"""One part in your own model: LayerScale in a plain PyTorch Transformer, 12 blocks deep.

You learn that a part is an ordinary `nn.Module` with plain arguments: it needs no config, no base class and none of
fathoms' models. The same network is trained twice on scikit-learn's handwritten digits, without LayerScale and with it.

    python examples/part_in_your_model.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from fathoms.parts import LayerScale

DIM, DEPTH, EPOCHS = 48, 12, 4


class Block(nn.Module):
    """Your own block; what fathoms adds is one line for each branch."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, num_heads=4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.scale1 = LayerScale(DIM, init_value=0.1) if scaled else nn.Identity()
        self.scale2 = LayerScale(DIM, init_value=0.1) if scaled else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (B, N, D) to tokens."""
        y = self.norm1(x)
        x = x + self.scale1(self.attention(y, y, y, need_weights=False)[0])
        return x + self.scale2(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """16 patches of 2 x 2 pixels, the blocks, the mean of the tokens, ten classes."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, DIM, kernel_size=2, stride=2)
        self.positions = nn.Parameter(0.02 * torch.randn(16, DIM))
        self.blocks = nn.Sequential(*[Block(scaled) for _ in range(DEPTH)])
        self.head = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images (B, 1, 8, 8) to logits (B, 10)."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(1))


def accuracy(scaled: bool) -> float:
    """Train for a few epochs; the share of 397 held-out digits that are recognised."""
    torch.manual_seed(0)
    pixels, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    images = pixels.float().view(-1, 1, 8, 8) / 8 - 1
    model = Transformer(scaled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(EPOCHS):
        for batch in torch.randperm(1400).split(50):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        return (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()


if __name__ == "__main__":
    for scaled, name in [(False, "plain"), (True, "with LayerScale")]:
        print(f"{DEPTH} blocks, {name}: {accuracy(scaled):.1%} right after {EPOCHS} epochs")
