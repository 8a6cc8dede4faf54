"""From the same weights and batches, training goes the way of timm's models under timm's optimizers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fathoms
from fathoms.training.optimization import build_optimizer

timm = pytest.importorskip("timm")
optimizers = pytest.importorskip("timm.optim")

UPDATES, LR, DECAY = 20, {"adamw": 1e-3, "lamb": 5e-3}, 0.05


class AuthorsScaler(nn.Module):
    """The norm of LearnableScaler's README; its fork of timm is timm's ViT with it."""

    def __init__(self, num_channels, **_unused):
        super().__init__()
        self.a = nn.Parameter(nn.init.normal_(torch.ones(num_channels)))
        self.b = nn.Parameter(torch.zeros(num_channels))

    def forward(self, x):
        return self.a[None, None, :] * x + self.b[None, None, :]


# timm's model, what it is built with besides, and the name here.
MODELS = {
    "vit": ("vit_tiny_patch16_224", {}, "vit_tiny_patch16_224"),
    "deit": ("deit_tiny_distilled_patch16_224", {}, "deit_tiny_distilled_patch16_224"),
    "deit3": ("deit3_small_patch16_224", {"init_values": 1e-4}, "deit3_small_patch16_224"),
    "cait": ("cait_xxs24_224", {}, "cait_xxs24_224"),
    "scaler": ("vit_tiny_patch16_224", {"norm_layer": AuthorsScaler}, "vit_scaler_192x12_16"),
}


def losses(model, optimizer, batches):
    found = []
    for images, labels in batches:
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("opt", LR)
@pytest.mark.parametrize("kind", MODELS)
def test_twenty_updates_give_timms_losses(kind, opt):
    name, theirs, own = MODELS[kind]
    sizes = {"depth": 2, "num_classes": 10}
    torch.manual_seed(0)
    peer = timm.create_model(name, img_size=32, embed_dim=36, num_heads=3, **sizes, **theirs).double()
    model = fathoms.create_model(own, image_size=32, dim=36, heads=3, **sizes).double()
    fathoms.load_weights(model, peer.state_dict())
    if kind == "deit":
        # Both heads' mean in training too, as the model here gives it.
        peer.set_distilled_training(False)
    generator = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64),
            torch.randint(10, (4,), generator=generator),
        )
        for _ in range(UPDATES)
    ]
    start = model.head.weight.detach().clone()
    groups = fathoms.param_groups(model, DECAY)
    expected = losses(
        peer, optimizers.create_optimizer_v2(peer, opt, lr=LR[opt], weight_decay=DECAY), batches
    )
    found = losses(model, build_optimizer(groups, opt, lr=LR[opt]), batches)
    assert (found - expected).abs().max() < 1e-6
    # Training went somewhere: a learning rate of zero would agree as well.
    assert (model.head.weight - start).abs().max() > 5e-4
