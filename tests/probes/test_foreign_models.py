"""The probe measures models of timm, torchvision and transformers as it measures fathoms' own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fathoms
from fathoms import ViT, ViTConfig
from fathoms.probes.blocks import find_blocks

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL = {"img_size": 32, "num_classes": 7}


def timm_model(name, **options):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL | options)


def vit_small():
    return timm_model("vit_small_patch16_224", depth=2, embed_dim=48, num_heads=3, patch_size=8)


def deit3_small():
    return timm_model("deit3_small_patch16_224", depth=2, embed_dim=48, num_heads=3, patch_size=8)


def cait():
    return timm_model("cait_xxs24_224", depth=2, embed_dim=48, num_heads=2, patch_size=8)


def swin():
    return timm_model(
        "swin_tiny_patch4_window7_224", depths=(2, 2), embed_dim=24, num_heads=(2, 4), window_size=4
    )


def torchvision_vit():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 48, 96, num_classes=7)
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


def transformers_vit():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
    )


def dinov2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    return transformers.Dinov2Model(transformers.Dinov2Config(**sizes))


MODELS = {
    make.__name__: make
    for make in (vit_small, deit3_small, cait, swin, torchvision_vit, transformers_vit, dinov2)
}


def answer(model):
    with torch.no_grad():
        output = model.eval()(IMAGES)
    for name in ("logits", "pooler_output"):
        output = getattr(output, name, output)
    return output


@pytest.mark.parametrize("name", MODELS)
def test_a_foreign_model_is_measured_and_left_as_found(name):
    model = MODELS[name]()
    before = answer(model)
    signal = fathoms.probe(model, IMAGES)
    assert torch.equal(answer(model), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert signal.depth == len(find_blocks(model)) == (4 if name in ("cait", "swin") else 2)
    assert [site.branch for site in signal] == ["attn", "mlp"] * signal.depth
    for site in signal:
        assert min(site.added, site.gradient, site.weights) > 0, site
        if site.branch == "attn":
            assert 0 < site.entropy <= 1 + 1e-6, site
            assert site.logit > 0, site
        else:
            assert 0 <= site.dead <= 1, site
        assert (site.gamma_mean is not None) == (name in ("deit3_small", "cait", "dinov2")), site
        assert site.norm_mean is not None


def test_stream_and_branch_of_a_foreign_block_agree_with_a_measure_by_hand():
    model = vit_small().double().eval()
    images = IMAGES.double()
    block = model.blocks[0]
    with torch.no_grad():
        x = model._pos_embed(model.patch_embed(images))
        added = block.attn(block.norm1(x))
        more = block.mlp(block.norm2(x + added))
    attn, mlp = fathoms.probe(model, images)[:2]
    assert attn.stream == pytest.approx(x.square().mean().sqrt().item(), rel=1e-9)
    assert attn.added == pytest.approx(added.square().mean().sqrt().item(), rel=1e-9)
    assert mlp.stream == pytest.approx((x + added).square().mean().sqrt().item(), rel=1e-9)
    assert mlp.added == pytest.approx(more.square().mean().sqrt().item(), rel=1e-9)


def test_timm_with_the_same_weights_gives_the_numbers_of_a_fathoms_model(tmp_path):
    model = vit_small()
    torch.manual_seed(0)
    own = ViT(ViTConfig(image_size=32, patch_size=8, dim=48, heads=3, depth=2, num_classes=7))
    path = tmp_path / "timm.safetensors"
    fathoms.save_weights(own, path, layout="timm")
    from safetensors.torch import load_file

    model.load_state_dict(load_file(path))
    for ours, theirs in zip(fathoms.probe(own, IMAGES), fathoms.probe(model, IMAGES), strict=True):
        for column, value in vars(ours).items():
            if isinstance(value, float) and column not in ("alignment",):
                assert getattr(theirs, column) == pytest.approx(value, rel=2e-3, abs=1e-6), column


def test_post_norm_blocks_of_torch_are_followed():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, activation="gelu", batch_first=True)
            self.layers = nn.ModuleList([layer])
            self.head = nn.Linear(16, 3)

        def forward(self, images):
            x = images.flatten(2).unflatten(2, (4, -1))[:, 0, :, :16]
            return self.head(self.layers[0](x).mean(1))

    signal = fathoms.probe(Net(), IMAGES)
    assert [site.branch for site in signal] == ["attn", "mlp"]
    assert signal[1].stream == pytest.approx(1.0, rel=1e-3)


class Spelled(nn.Module):
    """Two blocks that call torch's functions with their arguments by name, or by place."""

    class Block(nn.Module):
        def __init__(self, attention, named):
            super().__init__()
            self.attention, self.named = attention, named
            self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
            self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
            self.mlp = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])

        def call(self, function, *args, **named):
            return function(*args, **named) if self.named else function(*args, *named.values())

        def attend(self, x):
            weight, bias, heads = self.attn.in_proj_weight, self.attn.in_proj_bias, self.attn.num_heads
            out = self.attn.out_proj
            if self.attention == "multihead":
                x = x.transpose(0, 1)
                ours = {"query": x, "key": x, "value": x, "embed_dim_to_check": 16, "num_heads": heads}
                ours |= {"in_proj_weight": weight, "in_proj_bias": bias, "bias_k": None, "bias_v": None}
                ours |= {"add_zero_attn": False, "dropout_p": 0.0}
                ours |= {"out_proj_weight": out.weight, "out_proj_bias": out.bias}
                return self.call(F.multi_head_attention_forward, **ours)[0].transpose(0, 1)
            qkv = F.linear(x, weight, bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            if self.attention == "fused":
                x = self.call(F.scaled_dot_product_attention, query=q, key=k, value=v)
            else:
                x = self.call(F.softmax, input=q @ k.mT * 8**-0.5, dim=-1) @ v
            return out(x.transpose(1, 2).flatten(2))

        def forward(self, x):
            x = self.norm1(x)
            x = self.call(torch.clone, input=x)
            x = self.call(torch.add, input=x, other=self.attend(x))
            y = self.call(F.layer_norm, input=x, normalized_shape=(16,))
            return x + self.mlp[1](self.call(F.gelu, input=self.mlp[0](y)))

    def __init__(self, attention, named):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([self.Block(attention, named) for _ in range(2)])
        self.head = nn.Linear(16, 3)

    def forward(self, images):
        x = images.flatten(2).unflatten(2, (8, -1))[:, 0, :, :16]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("attention", ["fused", "softmax", "multihead"])
def test_arguments_by_name_are_read_as_those_by_place(attention):
    by_name, by_place = (fathoms.probe(Spelled(attention, named), IMAGES) for named in (True, False))
    assert by_name == by_place
    assert all(site.entropy is not None for site in by_name if site.branch == "attn")
    assert all(site.dead is not None for site in by_name if site.branch == "mlp")


def test_a_wrong_image_size_of_a_foreign_model_is_one_line():
    with pytest.raises(fathoms.FathomsError, match="cannot take images of 3x40x40"):
        fathoms.probe(vit_small(), torch.randn(1, 3, 40, 40))


@pytest.mark.compile
def test_a_compiled_model_is_measured_as_the_model_inside_it():
    torch.manual_seed(0)
    own = ViT(ViTConfig(image_size=32, patch_size=8, dim=48, heads=3, depth=2, num_classes=7)).eval()
    expected = fathoms.probe(own, IMAGES)
    compiled = torch.compile(own, backend="eager")
    with torch.no_grad():
        compiled(IMAGES)
    assert fathoms.probe(compiled, IMAGES) == expected
    for block in own.blocks:
        block.compile(backend="eager")
    with torch.no_grad():
        own(IMAGES)
    assert fathoms.probe(own, IMAGES) == expected


def test_a_model_inside_ddp_is_measured_without_its_reducer(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        own = vit_small()
        wrapped = nn.parallel.DistributedDataParallel(own)
        wrapped(IMAGES).sum().backward()
        gradients = [p.grad.clone() for p in own.parameters()]
        assert fathoms.probe(wrapped, IMAGES) == fathoms.probe(own, IMAGES)
        assert all(torch.equal(p.grad, g) for p, g in zip(own.parameters(), gradients, strict=True))
    finally:
        dist.destroy_process_group()
