"""Where an architecture coincides with timm's, so do its outputs and its gradients."""

from __future__ import annotations

import pytest
import torch

import fathoms
from fathoms.models.weight_names import conv_to_linear, from_timm

timm = pytest.importorskip("timm")

NAMES = [
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "deit_small_patch16_224",
    "deit_small_distilled_patch16_224",
    "deit3_small_patch16_224",
    "cait_xs24_384",
    "cait_s24_224",
]
"""Compared in full depth and width on images of 96 pixels; two more are compared as published."""


def peer_of(name, **options):
    """timm's model, its weights moved off their start so that no scale is tiny and no bias is zero."""
    peer = timm.create_model(name, **options).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return peer


def relative(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(
    ("name", "size"),
    [("vit_tiny_patch16_224", 224), ("cait_xxs24_224", 224), *((name, 96) for name in NAMES)],
)
def test_logits_and_gradients_agree_with_timm(name, size):
    peer = peer_of(name, img_size=size)
    model = fathoms.create_model(name, image_size=size).eval()
    report = fathoms.load_weights(model, peer.state_dict())
    assert report.layout == "timm"
    images = torch.randn(1 if size == 96 else 2, 3, size, size, generator=torch.Generator().manual_seed(2))
    ours, theirs = model(images), peer(images)
    assert relative(ours, theirs) < 1e-5

    direction = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(3))
    (ours * direction).sum().backward()
    (theirs * direction).sum().backward()
    expected = from_timm({key: parameter.grad for key, parameter in peer.named_parameters()})
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        if key.endswith("proj_l.bias"):
            # The softmax cancels this bias: both gradients are zero up to rounding.
            assert gradient.abs().max() < 1e-4 * gradients[key.replace("bias", "weight")].abs().max()
        elif key.endswith("qkv.bias"):
            # A bias on the keys shifts a whole row of logits: its gradient is zero up to rounding too.
            parts, others = gradient.chunk(3), expected[key].chunk(3)
            assert relative(parts[0], others[0]) < 1e-4, key
            assert relative(parts[2], others[2]) < 1e-4, key
            assert (parts[1] - others[1]).norm() < 1e-4 * gradient.norm(), key
        elif key.endswith("attn.k.bias"):
            weight = gradients[key.replace("bias", "weight")]
            assert (gradient - expected[key]).norm() < 1e-4 * weight.norm(), key
        else:
            assert relative(gradient, expected[key]) < 1e-4, key


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224", "cait_xxs24_224"],
)
def test_saved_in_timms_layout_loads_strictly_into_timm(name, tmp_path):
    from safetensors.torch import load_file

    model = fathoms.create_model(name, num_classes=7, image_size=64).eval()
    fathoms.save_weights(model, tmp_path / "model.safetensors", layout="timm")
    peer = timm.create_model(name, num_classes=7, img_size=64).eval()
    peer.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert relative(model(images), peer(images)) < 1e-5


def test_another_image_size_resizes_positions_as_timm_does():
    peer = peer_of("vit_tiny_patch16_224")
    larger = timm.create_model("vit_tiny_patch16_224", img_size=288).eval()
    from timm.models.vision_transformer import checkpoint_filter_fn

    larger.load_state_dict(checkpoint_filter_fn(peer.state_dict(), larger))
    model = fathoms.create_model("vit_tiny_patch16_224", image_size=288).eval()
    report = fathoms.load_weights(model, peer.state_dict())
    assert report.resized == (14, 18)
    images = torch.randn(1, 3, 288, 288)
    with torch.no_grad():
        assert relative(model(images), larger(images)) < 1e-5


@pytest.mark.parametrize(
    "options", [{}, {"indices": 3}, {"indices": [0, 5], "norm": True, "output_fmt": "NLC"}]
)
def test_intermediates_agree_with_timm(options):
    peer = peer_of("vit_tiny_patch16_224")
    model = fathoms.create_model("vit_tiny_patch16_224").eval()
    fathoms.load_weights(model, peer.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        final, taken = model.forward_intermediates(images, **options)
        their_final, theirs = peer.forward_intermediates(images, **options)
    assert relative(final, their_final) < 1e-5
    assert len(taken) == len(theirs)
    for ours, other in zip(taken, theirs, strict=True):
        assert ours.shape == other.shape
        assert relative(ours, other) < 1e-5


def test_patch_projection_equals_the_convolution_exactly():
    """In float64 and integers no rounding can hide a wrong order of the columns."""
    from fathoms.parts import PatchEmbed

    convolution = torch.nn.Conv2d(3, 8, 4, stride=4).double()
    stem = PatchEmbed(8, patch_size=4).double()
    with torch.no_grad():
        for parameter in convolution.parameters():
            parameter.copy_(torch.randint(-9, 9, parameter.shape))
        stem.proj.weight.copy_(conv_to_linear(convolution.weight))
        stem.proj.bias.copy_(convolution.bias)
    images = torch.randint(-9, 9, (2, 3, 16, 8)).double()
    assert torch.equal(stem(images), convolution(images).flatten(2).transpose(1, 2))


class _Scaler(torch.nn.Module):
    """The norm of LearnableScaler's fork, which is otherwise timm's ViT."""

    def __init__(self, channels, **_):
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(channels))
        self.b = torch.nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        return self.a * x + self.b


_SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 10}
_AUTHORS = {
    "vit_tiny_patch16_224": {},
    "deit_tiny_distilled_patch16_224": {},
    "deit3_small_patch16_224": {},
    "cait_xxs24_224": {},
    "vit_learnable_scaler_embed_dim192_patch16_head3_depth12": {"norm_layer": _Scaler},
}


@pytest.mark.parametrize("patch", [4, 16, 32])
@pytest.mark.parametrize("name", _AUTHORS)
def test_every_parameter_starts_as_large_as_timms(name, patch):
    torch.manual_seed(0)
    shape = {**_SMALL, "img_size": 64, "patch_size": patch, "embed_dim": 192, "depth": 1}
    extra = _AUTHORS[name]
    peer = timm.create_model("vit_tiny_patch16_224" if extra else name, **shape, **extra)
    model = fathoms.create_model(
        name, image_size=64, patch_size=patch, dim=192, depth=1, heads=3, num_classes=10
    )
    theirs = from_timm(peer.state_dict())
    theirs |= {key: value[None] for key, value in theirs.items() if key == "readout.queries"}
    for key, parameter in model.named_parameters():
        if "deit3" in name and (key.startswith("readout") or "scale" in key):
            continue  # Its authors start the class token at 0.02 and gamma at 1e-4, timm at 1e-6 and 1e-5.
        if parameter.numel() < 100 or ("cait" in name and "scale" in key):
            continue  # A few draws say nothing. timm takes gamma from the name, CaiT's rule from the depth.
        size = parameter.square().mean().sqrt().item()
        assert size == pytest.approx(theirs[key].square().mean().sqrt().item(), rel=0.25, abs=1e-5), key
