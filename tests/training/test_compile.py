"""Compiled blocks: the numbers of the model, and what they save for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fathoms.errors import ConfigError
from fathoms.training.compiling import compile_blocks, kept_for_backward
from fathoms.training.master_weights import ComputeCopy
from tiny_models import layerscale_vit, random_images


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="no list of blocks"):
        compile_blocks(nn.Linear(2, 2))


@pytest.mark.compile
# torch's own tracing looks at the gradient of the tensor between two compiled blocks.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_give_the_models_numbers():
    plain, compiled = layerscale_vit(), layerscale_vit()
    compile_blocks(compiled, backend="eager", fullgraph=True)
    assert torch.equal(plain(random_images(6)), compiled(random_images(6)))


def kept_and_gradients(keep):
    """Bytes that a compiled block keeps for its backward pass, in tensors of the stream's size, and its gradients."""
    torch.compiler.reset()
    module = ComputeCopy(layerscale_vit()).module
    # The partitioner that inductor uses, without compiling its kernels.
    compile_blocks(module, backend="aot_eager_decomp_partition", dynamic=False)
    block = module.blocks[0]
    own = {parameter.data_ptr() for parameter in module.parameters()}
    x = torch.randn(64, 17, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    kept = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with kept_for_backward(keep), torch.autocast("cpu", dtype=torch.bfloat16):
        block(x)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = block(x)
        out.float().square().sum().backward()
    return sum(kept.values()) / x.nbytes, {name: p.grad for name, p in block.named_parameters()}


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")
def test_lean_blocks_keep_a_third_less_and_give_the_same_gradients():
    everything, expected = kept_and_gradients("all")
    lean, got = kept_and_gradients("lean")
    assert lean < 0.7 * everything, (lean, everything)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
