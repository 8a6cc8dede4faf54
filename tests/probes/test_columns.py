"""Every column of the probe against an independent float64 computation, written out token by token."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fathoms
from fathoms import ViT, ViTConfig
from fathoms.probes.signal import COLUMNS, Site
from fathoms.probes.tensor_statistics import attention_statistics

SIZES = {
    "image_size": 8,
    "patch_size": 2,
    "in_channels": 1,
    "dim": 12,
    "heads": 2,
    "num_classes": 5,
    "depth": 2,
}


def model_of(**options):
    torch.manual_seed(3)
    model = ViT(ViTConfig(**SIZES | options))
    with torch.no_grad():
        # Large enough that logits, tokens and saturation are far from their trivial values.
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def batch(count=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 8, 8, generator=generator), torch.tensor([0, 3, 4][:count])


class ByHand:
    """The first block of a pre-norm model, computed in float64 with numpy from the weights alone."""

    def __init__(self, model, images):
        self.model = model
        double = ViT(model.config).double().eval()
        double.load_state_dict(model.state_dict())
        self.double = double
        with torch.no_grad():
            self.x = double.embed(images.double()).numpy()
        self.block = double.blocks[0]

    def weight(self, module, name="weight"):
        return getattr(module, name).detach().numpy()

    def linear(self, module, x):
        return x @ self.weight(module).T + self.weight(module, "bias")

    def norm(self, join, x):
        norm = join.norm
        if self.model.config.norm == "dyt":
            return np.tanh(self.weight(norm, "alpha") * x) * self.weight(norm) + self.weight(norm, "bias")
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + norm.eps)
        return scaled * self.weight(norm) + self.weight(norm, "bias")

    def attention(self, x):
        entered = self.norm(self.block.attn_join, x)
        heads, width = 2, 6
        qkv = self.linear(self.block.attn.qkv, entered)
        b, n, _ = qkv.shape
        q, k, v = qkv.reshape(b, n, 3, heads, width).transpose(2, 0, 3, 1, 4)
        logits = np.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(width)
        probs = np.exp(logits - logits.max(-1, keepdims=True))
        probs /= probs.sum(-1, keepdims=True)
        out = np.einsum("bhqk,bhkd->bhqd", probs, v).transpose(0, 2, 1, 3).reshape(b, n, -1)
        added = self.weight(self.block.attn_join.scale, "gamma") * self.linear(self.block.attn.proj, out)
        return logits, probs, added

    def mlp(self, x):
        hidden = self.linear(self.block.mlp.fc1, self.norm(self.block.mlp_join, x))
        curve = hidden * 0.5 * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2)))
        return hidden, self.weight(self.block.mlp_join.scale, "gamma") * self.linear(
            self.block.mlp.fc2, curve
        )


def size(x):
    return math.sqrt((x**2).mean())


def close(a, b):
    assert a == pytest.approx(b, rel=2e-4, abs=1e-9)


def check_join(site, x, added):
    close(site.stream, size(x))
    close(site.stream_max, np.abs(x).max())
    close(site.added, size(added))
    close(site.added_max, np.abs(added).max())
    close(site.ratio, size(added) / size(x))
    along = across = energy = 0.0
    cosines = []
    for token, step in zip(x.reshape(-1, 12), added.reshape(-1, 12), strict=True):
        part = token * (token @ step) / (token @ token)
        along += part @ part
        across += (step - part) @ (step - part)
        energy += token @ token
        cosines.append(token @ step / math.sqrt((token @ token) * (step @ step)))
    close(site.parallel, math.sqrt(along / energy))
    close(site.orthogonal, math.sqrt(across / energy))
    close(site.parallel**2 + site.orthogonal**2, site.ratio**2)
    close(site.alignment, np.mean(cosines))
    after = x + added
    pairs, mean_energy, total = [], 0.0, 0.0
    for image in after:
        for i, a in enumerate(image):
            pairs += [a @ b / math.sqrt((a @ a) * (b @ b)) for j, b in enumerate(image) if i != j]
        mean_energy += len(image) * (image.mean(0) ** 2).sum()
        total += (image**2).sum()
    close(site.token_cosine, np.mean(pairs))
    close(site.token_mean, mean_energy / total)
    return after


def test_activations_and_attention_agree_with_float64_by_hand():
    model = model_of(residual="layerscale", residual_init=0.5)
    images, labels = batch()
    attn, mlp = fathoms.probe(model, images, labels)[:2]
    hand = ByHand(model, images)
    logits, probs, added = hand.attention(hand.x)
    middle = check_join(attn, hand.x, added)
    close(attn.logit, np.abs(logits).max())
    close(attn.entropy, np.mean(-(probs * np.log(probs)).sum(-1)) / math.log(probs.shape[-1]))
    distances = []
    for rows in probs[:, :, 1:, 1:].reshape(-1, 16, 16):
        for query, row in enumerate(rows):
            far = [math.dist(divmod(query, 4), divmod(key, 4)) for key in range(16)]
            distances.append(row @ far / row.sum())
    close(attn.distance, np.mean(distances))
    close(attn.largest, max(np.abs(hand.x).max(), np.abs(added).max(), np.abs(logits).max()))
    hidden, more = hand.mlp(middle)
    check_join(mlp, middle, more)
    close(mlp.hidden_max, np.abs(hidden).max())
    close(mlp.largest, max(np.abs(part).max() for part in (middle, more, hidden)))
    gamma = np.abs(hand.weight(hand.block.attn_join.scale, "gamma"))
    close(attn.gamma_mean, gamma.mean())
    close(attn.gamma_min, gamma.min())
    close(attn.gamma_max, gamma.max())
    weight = np.abs(hand.weight(hand.block.attn_join.norm))
    close(attn.norm_mean, weight.mean())
    close(attn.norm_min, weight.min())
    close(attn.norm_max, weight.max())
    assert (attn.dead, mlp.entropy, attn.saturated) == (None, None, None)


def test_gradients_agree_with_float64_autograd_through_the_rest_of_the_model():
    model = model_of(residual="layerscale", residual_init=0.5)
    images, labels = batch()
    site = fathoms.probe(model, images, labels)[0]
    double = ByHand(model, images).double
    block = double.blocks[0]
    x = double.embed(images.double())
    middle = block.add_attention(x).detach().requires_grad_()
    out = double.blocks[1](block.add_mlp(middle))
    nn.functional.cross_entropy(double.forward_head(double.norm(out)), labels).backward()
    close(site.gradient, middle.grad.norm().item())
    close(site.gradient_rms, size(middle.grad.numpy()))
    double.zero_grad()
    nn.functional.cross_entropy(double(images.double()), labels).backward()
    gradients = [p.grad.flatten() for part in (block.attn_join, block.attn) for p in part.parameters()]
    whole = torch.cat(gradients).numpy()
    close(site.weights, math.sqrt((whole**2).sum()))
    close(site.weights_rms, size(whole))


def test_dead_units_are_those_below_minus_three_at_every_token():
    model = model_of(residual="layerscale", residual_init=0.5)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.bias[:7] = -60.0
        model.blocks[0].mlp.fc1.bias[7:9] = -6.0
    images, labels = batch()
    hand = ByHand(model, images)
    hidden, _ = hand.mlp(hand.x + hand.attention(hand.x)[2])
    share = np.mean([(hidden[..., unit] <= -3).all() for unit in range(hidden.shape[-1])])
    assert 7 / 48 <= share < 1
    close(fathoms.probe(model, images, labels)[1].dead, share)


def test_saturation_is_the_share_of_values_beyond_two():
    model = model_of(norm="dyt", norm_init=1.5, residual="layerscale", residual_init=0.5)
    images, labels = batch()
    site = fathoms.probe(model, images, labels)[0]
    hand = ByHand(model, images)
    share = np.mean(np.abs(hand.weight(hand.block.attn_join.norm, "alpha") * hand.x) > 2)
    assert 0 < share < 1
    close(site.saturated, share)


def test_values_that_16_bit_formats_cannot_hold_are_counted():
    model = model_of(residual="layerscale", residual_init=0.5)
    with torch.no_grad():
        model.position.table[0, :3] = 1e5
        model.position.table[1, :2] = 2.0**125
    images, labels = batch()
    site = fathoms.probe(model, images, labels)[0]
    hand = ByHand(model, images)
    values = np.concatenate([hand.x.ravel(), hand.attention(hand.x)[2].ravel()])
    assert (np.abs(values) > 2.0**120).any()
    close(site.float16, np.mean(np.abs(values) > 65504))
    close(site.bfloat16, np.mean(np.abs(values) > 2.0**120))


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_update_ratio_is_the_length_of_a_real_update(kind):
    """With a gradient of zero, the optimizer's next step is what its state says, decayed once."""
    model = model_of(residual="layerscale", residual_init=0.5)
    images, labels = batch()
    betas = {"betas": (0.8, 0.9), "weight_decay": 0.1} if kind == "adamw" else {"momentum": 0.7}
    make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.02, **betas)
    assert fathoms.probe(model, images, labels, optimizer=optimizer)[0].update is None
    for _ in range(3):
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    measured = fathoms.probe(model, images, labels, optimizer=optimizer)[0].update
    names = [*model.blocks[0].attn_join.parameters(), *model.blocks[0].attn.parameters()]
    before = torch.cat([p.detach().flatten().double() for p in names])
    expected = []
    for p in names:
        state = optimizer.state[p]
        if kind == "sgd":
            expected.append(0.02 * state["momentum_buffer"].double().flatten())
            continue
        m = state["exp_avg"].double() / (1 - 0.8**3)
        v = state["exp_avg_sq"].double() / (1 - 0.9**3)
        expected.append((0.02 * (m / (v.sqrt() + 1e-8) + 0.1 * p.detach().double())).flatten())
    close(measured, (torch.cat(expected).norm() / before.norm()).item())


def test_every_column_has_a_test_and_a_description():
    source = Path(__file__).read_text(encoding="utf-8")
    for name in COLUMNS:
        assert f".{name}" in source, name
        assert f"{name}:" in (Site.__doc__ or ""), name
    assert len(COLUMNS) == len(fields(Site)) - 2


def test_a_key_that_a_mask_of_minus_a_hundred_hides_has_no_logit():
    """Swin's shifted windows add -100, not minus infinity."""
    logits = torch.tensor([[3.0, -2.0, 1.0 - 100.0]])
    assert attention_statistics(logits)["logit"] == 3.0
    assert attention_statistics(torch.tensor([[120.0, 0.0]]))["logit"] == 120.0
