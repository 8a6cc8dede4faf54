"""x + a b + bias: cuBLASLt against float64 and against the plain form, on a GPU; the rest of it everywhere."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

from fathoms.errors import BackendError, ShapeError
from fathoms.ops.add_product import add_product, add_product_reference, why_not_cublas

# Custom operations cannot be registered under jaxtyping's import hook.
pytestmark = pytest.mark.plain

# torch's own check looks at the gradients of tensors that are no leaves.
opchecked = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# name: M, N, K, how a and b lie, whether there is a bias
CASES = {
    "proj": (50432, 192, 192, "rows", "turned", True),
    "gradient": (50432, 192, 768, "rows", "rows", False),
    "odd_tokens": (1237, 64, 8, "rows", "turned", True),
    "one_token": (1, 8, 8, "rows", "turned", False),
    "turned": (131, 24, 40, "turned", "rows", True),
    "strided": (131, 24, 40, "strided", "strided", True),
    "unaligned": (131, 24, 40, "unaligned", "rows", True),
    "long": (16, 8, 65536, "rows", "turned", True),
    "no_token": (0, 8, 16, "rows", "rows", True),
}


def lay(rows, columns, how, **options):
    """A random matrix that lies in memory in one of several ways."""
    if how == "turned":
        return torch.randn(columns, rows, **options).T
    if how == "strided":
        return torch.randn(2 * rows, 2 * columns, **options)[::2, ::2]
    if how == "unaligned":
        return torch.randn(rows, columns + 1, **options)[:, 1:]
    return torch.randn(rows, columns, **options)


def make_inputs(name, dtype=torch.bfloat16, device="cuda"):
    torch.manual_seed(0)
    m, n, k, a_lies, b_lies, biased = CASES[name]
    options = {"dtype": dtype, "device": device}
    x, a = lay(m, n, a_lies, **options), lay(m, k, a_lies, **options)
    bias = lay(1, n, b_lies, **options)[0] if biased else None
    return x, a, lay(k, n, b_lies, **options) * k**-0.5, bias


def as_leaves(given):
    """Each as a tensor of its own, which is how torch's check copies them."""
    return [part.clone(memory_format=torch.contiguous_format).requires_grad_() for part in given]


def outcome(form, given, wide=False):
    """The output and the gradients of everything given."""
    leaves = [None if part is None else part.double() if wide else part for part in given]
    leaves = [None if part is None else part.detach().requires_grad_() for part in leaves]
    y = form(*leaves)
    there = [part for part in leaves if part is not None]
    grad = torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).sin().reshape(y.shape)
    return [y.detach(), *torch.autograd.grad(y, there, grad.to(y.dtype))]


# torch's own, when the thread of the first backward pass multiplies before it has done anything else.
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_cublas_errs_no_more_than_the_plain_form(name, dtype):
    given = make_inputs(name, dtype)
    exact = outcome(add_product_reference, given, wide=True)
    fused = outcome(lambda *parts: add_product(*parts, impl="cublas"), given)
    plain = outcome(add_product_reference, given)
    for truth, found, other in zip(exact, fused, plain, strict=True):
        assert found.dtype == dtype
        off, beside = ((part.double() - truth).norm() for part in (found, other))
        assert off <= 1.2 * beside, (off.item(), beside.item())


@pytest.mark.gpu
@on_a_gpu
def test_auto_is_cublas_and_the_same_every_time():
    given = make_inputs("proj")
    first = add_product(*given)
    assert why_not_cublas(*given) is None
    assert torch.equal(first, add_product(*given, impl="cublas"))
    assert not torch.equal(first, add_product_reference(*given))


@pytest.mark.gpu
@on_a_gpu
def test_the_bias_of_each_call_is_its_own():
    x, a, b, bias = make_inputs("odd_tokens")
    others = [torch.full_like(bias, value) for value in (1.0, 2.0, 3.0)]
    found = [add_product(x, a, b, other, impl="cublas") for other in others]
    for one, other in zip(found, others, strict=True):
        assert torch.allclose(one.float(), add_product_reference(x, a, b, other).float(), atol=0.1)


@pytest.mark.gpu
@on_a_gpu
def test_it_runs_in_a_cuda_graph_and_on_another_stream():
    given = make_inputs("proj")
    expected = add_product(*given, impl="cublas")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = add_product(*given, impl="cublas")
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@opchecked
@pytest.mark.gpu
@on_a_gpu
def test_device_op_passes_opcheck():
    from fathoms.ops.cublas import cublas_add_product

    given = as_leaves(make_inputs("turned"))
    assert set(torch.library.opcheck(cublas_add_product, given).values()) == {"SUCCESS"}


@opchecked
def test_op_passes_opcheck_where_there_is_no_gpu():
    from fathoms.ops.cublas import cublas_add_product

    given = as_leaves(make_inputs("turned", torch.float64, "cpu"))
    assert set(torch.library.opcheck(cublas_add_product, given).values()) == {"SUCCESS"}
    x, a, b, bias = given
    assert torch.equal(cublas_add_product(x, a, b, bias), add_product_reference(x, a, b, bias))
    assert torch.autograd.gradcheck(cublas_add_product, (x[:3], a[:3], b, bias))
    assert torch.autograd.gradcheck(cublas_add_product, (x[:3], a[:3], b, None))


def test_elsewhere_it_is_refused_with_the_reason_or_the_plain_form():
    given = make_inputs("odd_tokens", device="cpu")
    assert torch.equal(add_product(*given), add_product_reference(*given))
    why = r'add_product: impl="cublas" cannot run: x is on cpu, not on a CUDA device; use impl="auto"'
    with pytest.raises(BackendError, match=why):
        add_product(*given, impl="cublas")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": torch.float32}, "not all bfloat16 or all float16"),
        ({"sizes": (4, 8, 12)}, "b is (12, 8), cuBLAS is fast for multiples of 8"),
        ({"sizes": (4, 8, 0)}, "b is (0, 8)"),
        ({"dual": True}, "a forward-mode derivative is asked for"),
        ({"device": "cpu"}, "x and the others are on different devices"),
        ({"device": "cuda:1"}, "x and the others are on different devices"),
        ({"subclass": True}, "x or another is more than a plain tensor"),
    ],
)
def test_where_cublas_cannot_serve_it_is_left_for_a_reason(change, why):
    """On meta-like CUDA tensors, which no device has to hold."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    m, n, k = change.get("sizes", (4, 8, 16))
    with FakeTensorMode(), forward_ad.dual_level() if change.get("dual") else torch.no_grad():
        x, a, b = (
            torch.empty(shape, device=device, dtype=change.get("dtype", torch.bfloat16))
            for shape, device in (
                ((m, n), "cuda:0"),
                ((m, k), "cuda:0"),
                ((k, n), change.get("device", "cuda:0")),
            )
        )
        b = TwoTensor(b, b) if change.get("subclass") else b
        assert why in (why_not_cublas(x, a, b) or "")


@pytest.mark.gpu
@on_a_gpu
def test_on_a_device_it_compiles_without_graph_breaks():
    given = make_inputs("proj")
    compiled = torch.compile(add_product, fullgraph=True)
    assert torch.equal(compiled(*given), add_product(*given, impl="cublas"))


def test_the_compiler_does_not_look_into_ctypes():
    from fathoms.ops.cublas import why_not_library

    here = torch.compile(lambda x: x + (why_not_library() is None), fullgraph=True, backend="eager")
    assert here(torch.zeros(1)).item() == (why_not_library() is None)


def test_the_op_itself_refuses_what_it_would_read_past():
    from fathoms.ops.cublas import cublas_add_product

    x, a, b, bias = make_inputs("turned", torch.float32, "cpu")
    with pytest.raises(ShapeError, match=r"add_product: bias is \(1,\); give \(24,\)"):
        cublas_add_product(x, a, b, bias[:1])


def test_wrong_shapes_are_refused():
    x, a, b = torch.zeros(2, 8), torch.zeros(2, 4), torch.zeros(4, 8)
    with pytest.raises(ShapeError, match=r"add_product: a is \(2, 4\) and b \(8, 4\); give \(M, K\)"):
        add_product(x, a, b.T)
    with pytest.raises(ShapeError, match=r"add_product: x is \(2, 7\); give \(2, 8\)"):
        add_product(x[:, 1:], a, b)
    with pytest.raises(ShapeError, match=r"add_product: bias is \(4,\); give \(8,\)"):
        add_product(x, a, b, torch.zeros(4))
