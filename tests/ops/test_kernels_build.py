"""Every Triton kernel builds for a GPU, which a machine without one can see: Triton compiles for a named target."""

import numpy as np
import pytest
import torch

from fathoms.ops.dispatch import HAS_TRITON, interpreting

pytestmark = [
    pytest.mark.slow,
    pytest.mark.compile,
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
    pytest.mark.skipif(interpreting(), reason="Triton's interpreter compiles nothing"),
]
TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.bool: "*u1",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def type_of(argument):
    """Triton's name for the type of one argument of a launch."""
    if isinstance(argument, torch.Tensor):
        return TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def build(kernel, arguments, compiled):
    """Compile a kernel as `launch` would on an H200, up to the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: value for name, value in compiled.items() if name not in kernel.arg_names}
    values = dict(zip(kernel.arg_names, arguments, strict=False)) | {
        name: value for name, value in compiled.items() if name in kernel.arg_names
    }
    assert set(values) == set(kernel.arg_names)
    constants = {
        (at,): values[parameter.name]
        for at, parameter in enumerate(kernel.params)
        if parameter.is_constexpr or values[parameter.name] is None
    }
    signature = {
        name: "constexpr" if (at,) in constants else type_of(values[name])
        for at, name in enumerate(kernel.arg_names)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.fixture
def built(monkeypatch):
    """Names of the kernels that were launched; each is compiled instead of run."""
    from fathoms.data.augment import launches
    from fathoms.ops import triton_gelu, triton_talking_heads

    names = set()

    def compile_it(kernel, _grid, *arguments, **compiled):
        assert "cubin" in build(kernel, arguments, compiled).asm
        names.add(kernel.fn.__name__)

    for module in (launches, triton_gelu, triton_talking_heads):
        monkeypatch.setattr(module, "launch", compile_it)
    monkeypatch.setattr(launches, "why_not_triton", lambda _: None)
    return names


# One part of channels, two parts, many tokens.
@pytest.mark.parametrize(("tokens", "channels"), [(9, 16), (17, 48), (300, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_talking_heads_build(built, dtype, tokens, channels):
    from fathoms.ops import triton_talking_heads as op

    q, k, v = torch.zeros(3, 2, 4, tokens, channels, dtype=dtype)
    weight, bias = torch.eye(4), torch.zeros(4)
    op.talking_heads_forward(q, k, v, weight, bias, weight, bias, 0.25)
    op.talking_heads_backward(q, q, k, v, weight, weight, None, 0.25)
    assert built == {"outer_kernel", "mix_kernel", "mix_grad_kernel", "inner_kernel"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_gelu_build(built, dtype):
    from fathoms.ops import triton_gelu as op

    x, bias = torch.zeros(6, 40, dtype=dtype), torch.zeros(40, dtype=dtype)
    for shift in (bias, None):
        op.gelu_forward(x, shift)
        op.gelu_backward(x, x, shift)
    assert built == {"gelu_kernel", "gelu_grad_kernel"}


@pytest.mark.parametrize("size", [17, 32, 224])
def test_kernels_of_policies_build(built, size):
    from fathoms.data.augment.launches import apply_layer
    from fathoms.data.augment.policies import Layer

    kinds = ("rotate", "equalize", "contrast", "gaussian_blur")
    layer = Layer({kind: np.array([at]) for at, kind in enumerate(kinds)}, np.ones(4), np.zeros(4, bool))
    images = torch.zeros(4, 3, size, size, dtype=torch.uint8)
    apply_layer(images, layer, torch.zeros(3, dtype=torch.uint8))
    assert built == {"table_kernel", "layer_kernel", "blur_kernel"}


@pytest.mark.parametrize("mode", ["const", "rand", "pixel", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_that_erases_and_mixes_builds(built, dtype, mode):
    from fathoms.data.augment.erase_and_mix import Erasing, Finish, MixOptions, draw_mixture, draw_rectangles
    from fathoms.data.augment.launches import finish
    from fathoms.data.counter_rng import generator, sample_keys

    keys = sample_keys(0, 0, "erase", np.arange(4))
    drawn = Finish(None, None)
    if mode is not None:
        erasing = Erasing(draw_rectangles(keys, 0.7, 2, 32, 24), mode, keys)
        drawn = Finish(
            erasing, draw_mixture(MixOptions(mixup=0.8, cutmix=1.0), generator(0, 0, "mix"), 4, 32, 24)
        )
    images = torch.zeros(4, 3, 32, 24, dtype=torch.uint8)
    finish(images, torch.ones(3, 1, 1), torch.zeros(3, 1, 1), dtype, drawn)
    assert built == {"finish_kernel"}


def test_kernels_that_crop_and_resize_build(built):
    from fathoms.data.augment.launches import resize_boxes
    from fathoms.data.images.pixels import PixelLayout, as_words, ragged

    flat, offset, sizes = ragged([np.zeros((h, w, 3), np.uint8) for h, w in ((40, 50), (31, 22))])
    words = as_words(torch.from_numpy(flat)).view(-1)
    for side, box in ((24, (3, 4, 20, 21)), (16, (0, 0, 16, 16))):
        flags = np.array([True, False])
        layout = PixelLayout(offset, sizes[:, 1], sizes, np.array([box, box]), flags, flags)
        resize_boxes(words, layout, side)
    assert built == {"columns_kernel", "rows_kernel", "copy_kernel"}
