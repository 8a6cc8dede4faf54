"""The Triton kernels of a layer against the reference on one image at a time, `per_image.apply_layer`."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from fathoms.data.augment import per_image
from fathoms.data.augment.per_image import PLANE
from fathoms.data.augment.policies import LEVELS, Layer, draw_jitter, draw_layers, parse_policy
from fathoms.errors import BackendError

FILL = (124, 116, 104)
FACTORS = {
    "auto_contrast": [0.0],
    "equalize": [0.0],
    "invert": [0.0],
    "posterize": [0.0, 1.0, 3.0, 8.0],
    "solarize": [0.0, 1.0, 77.0, 256.0],
    "solarize_add": [0.0, 55.0, 110.0],
    "brightness": [0.0, 1.0, 0.73, 1.9, -1.0],
    "contrast": [0.0, 1.0, 0.37, 1.63, -1.0],
    "colour": [0.0, 1.0, 0.3, 1.9, -1.0],
    "sharpness": [0.0, 1.0, 0.1, 1.9, -1.0],
    "rotate": [-30.0, 0.0, 0.5, 21.3],
    "shear_x": [-0.3, 0.0, 0.21],
    "shear_y": [-0.13, 0.0, 0.3],
    "translate_x": [-0.45, 0.25, 0.31234],
    "translate_y": [-0.2, 0.0, 0.45],
    "gaussian_blur": [0.0, 0.1, 0.9, 2.0],
    "hue": [-0.5, -0.2, 0.0, 0.1, 0.33],
}
# Share of the bytes that may be one level apart where Pillow does the reference's work, in float64 and in integers; all
# other operations give the same bytes.
APART = {"rotate": 5e-3, "gaussian_blur": 0.15}
# Shares of pixels that are further apart than one level. A rotated pixel on the very border between inside and fill may
# fall either way; the roundings of a blur's six passes may add up, in one pixel of four million.
FAR_APART = {"rotate": 1e-5, "gaussian_blur": 1e-6}
SIZES = [(17, 23), (1, 1), (1, 7), (3, 3), (5, 4), (33, 40)]
POLICIES = ("rand-m9-mstd0.5-inc1", "rand-m9-mstd0.5-inc1-n1-p1.0", "3a", "v0")


def noise(count, height, width, device="cpu"):
    """Images of random values, one in five in a narrow range and one in five of a single colour."""
    rng = np.random.default_rng(height * 1000 + width)
    values = rng.integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    values[1::5] = values[1::5] // 8 + 90
    values[2::5] = values[2::5, :, :1, :1]
    return torch.from_numpy(values).to(device)


def layer_of(entries):
    """A layer with one image for each (kind, factor, cubic); no kind: the image stays."""
    kinds, factors, cubic = zip(*entries, strict=True)
    rows = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in dict.fromkeys(kinds) if kind}
    return Layer(rows, np.array(factors), np.array(cubic))


def one_kind(kind):
    filters = (False, True) if kind in PLANE else (False,)
    entries = [(kind, factor, cubic) for cubic in filters for factor in FACTORS[kind]]
    # Once on every kind of image `noise` makes, and one image between that stays.
    return [*entries, ("", 0.0, False), *[entries[-1]] * 4]


def every_kind():
    kinds = {**FACTORS, "": [0.0]}
    return [(kind, factors[-1], cubic) for cubic in (False, True) for kind, factors in kinds.items()]


def drawn(policy, count):
    return draw_layers(parse_policy(policy), np.arange(count, dtype=np.uint64) * 977 + 5)


def cases(count=24):
    """Name of each case, and how its images and layer are made."""
    made = {kind: lambda kind=kind: on_noise(one_kind(kind), 32, 32) for kind in FACTORS}
    for height, width in SIZES:
        made[f"{height}x{width}"] = lambda h=height, w=width: on_noise(every_kind(), h, w)
    some = ("rotate", "equalize", "contrast", "auto_contrast", "sharpness")
    made["large"] = lambda: on_noise([(kind, FACTORS[kind][-1], True) for kind in some], 224, 224)
    made["large blur"] = lambda: on_noise([("gaussian_blur", 1.7, False)], 96, 96)
    for policy in POLICIES:
        for number in range(len(parse_policy(policy).layers)):
            made[f"{policy}, layer {number}"] = lambda policy=policy, number=number: drawn_case(
                policy, number, count
            )
    for number in range(4):
        made[f"jitter, layer {number}"] = lambda number=number: (noise(12, 32, 32), jittered()[number])
    made["one image"] = lambda: on_noise([("rotate", 20.0, True)], 32, 32)
    made["no rows"] = lambda: (noise(3, 8, 8), Layer({}, np.zeros(3), np.zeros(3, bool)))
    made["no images"] = lambda: (noise(0, 8, 8), Layer({}, np.zeros(0), np.zeros(0, bool)))
    turned = [("equalize", 0.0, False), *[("shear_x", 0.2, True)] * 3]
    made["not contiguous"] = lambda: (noise(4, 20, 12).transpose(2, 3), layer_of(turned))
    return made


def on_noise(entries, height, width):
    return noise(len(entries), height, width), layer_of(entries)


def drawn_case(policy, number, count):
    # Blurs take the interpreter long.
    layer = drawn(policy, count // 3 if policy == "3a" else count)[number]
    return noise(len(layer.argument), 32, 32), layer


def jittered():
    return draw_jitter((0.4, 0.4, 0.4, 0.3), np.arange(12, dtype=np.uint64))


def check(images, layer, most_apart):
    """The kernels' bytes are the reference's, but for one level in a share `most_apart` of them, or in `APART`."""
    from fathoms.data.augment.launches import apply_layer

    fill = torch.tensor(FILL, dtype=torch.uint8, device=images.device)
    before = images.clone()
    found = apply_layer(images, layer, fill)
    expected = per_image.apply_layer(before.clone(memory_format=torch.contiguous_format), layer, fill)
    assert torch.equal(images, before)
    # Without an operation nothing is copied.
    assert (found is images) == (not layer.rows)
    if images.numel():
        difference = (found.int() - expected.int()).abs()
        for kind, rows in layer.rows.items():
            assert (difference[rows] > 0).double().mean() <= APART.get(kind, most_apart), kind
            assert (difference[rows] > 1).double().mean() <= FAR_APART.get(kind, 0), kind


@pytest.mark.kernels
@pytest.mark.parametrize("name", cases())
def test_kernels_give_the_reference_s_bytes_and_leave_the_given_images_alone(
    kernel_device, monkeypatch, name
):
    if kernel_device.type == "cpu":
        from fathoms.data.augment import launches as module

        # The interpreter takes as long for a small tile as for a large one; one case has the tiles of the device.
        tile = 16 * module.TILE if name == "large" else module.TILE
        monkeypatch.setattr(module, "TILE", tile)
        monkeypatch.setattr(module, "PART", module.PART if name == "33x40" else tile)
    images, layer = cases(24 if kernel_device.type == "cpu" else 512)[name]()
    # On a CPU a sum that another processor fuses differently may be cut off on the other side of a whole number. On
    # some GPUs torch divides by a number, and multiplies and adds, in one rounding.
    check(images.to(kernel_device), layer, 1e-4 if kernel_device.type == "cpu" else 1e-3)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("policy", "kernels"),
    [
        ("rand-m9-mstd0.5-inc1", {"table_kernel": 1, "layer_kernel": 1}),
        ("3a", {"table_kernel": 1, "layer_kernel": 1, "blur_kernel": 1}),
    ],
)
def test_a_layer_takes_two_launches_and_a_blur_one_more(kernel_device, monkeypatch, policy, kernels):
    from fathoms.data.augment import launches as module

    seen, launch = Counter(), module.launch

    def count(kernel, grid, *arguments, **options):
        seen[kernel.fn.__name__] += 1
        launch(kernel, grid, *arguments, **options)

    monkeypatch.setattr(module, "launch", count)
    layer = drawn(policy, 12)[0]
    fill = torch.tensor(FILL, dtype=torch.uint8, device=kernel_device)
    module.apply_layer(noise(12, 2, 4, kernel_device), layer, fill)
    assert seen == kernels


def test_every_operation_of_a_policy_has_a_code():
    module = pytest.importorskip("fathoms.data.augment.launches", reason="triton is not installed")
    kinds = {operation.kind for operation in LEVELS.values()} | {"hue"}
    assert kinds <= set(module.CODES) == set(FACTORS)


def test_a_cpu_is_refused_with_the_reason():
    module = pytest.importorskip("fathoms.data.augment.launches", reason="triton is not installed")
    with pytest.raises(BackendError, match="apply_layer: the Triton kernels cannot run: x is on cpu"):
        module.apply_layer(noise(1, 4, 4), layer_of([("invert", 0.0, False)]), torch.zeros(3).byte())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("count", "size"), [(4096, 32), (64, 224), (16, 384)], ids=str)
def test_device_kernels_agree_on_whole_batches(policy, count, size):
    for layer in drawn(policy, count):
        check(noise(count, size, size, "cuda"), layer, 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_kernels_reach_images_beyond_two_to_the_31_bytes():
    from fathoms.data.augment.launches import apply_layer

    count, some = 14400, every_kind()
    ends = np.r_[0 : len(some), count - len(some) : count]
    small = layer_of([*some, *some])
    argument, cubic = np.zeros(count), np.zeros(count, bool)
    argument[ends], cubic[ends] = small.argument, small.cubic
    layer = Layer({kind: ends[rows] for kind, rows in small.rows.items()}, argument, cubic)
    images = torch.randint(0, 256, (count, 3, 224, 224), dtype=torch.uint8, device="cuda")
    assert images.numel() > 2**31
    fill = torch.tensor(FILL, dtype=torch.uint8, device="cuda")
    found = apply_layer(images, layer, fill)
    expected = apply_layer(images[ends], small, fill)
    assert torch.equal(found[ends], expected)
    assert torch.equal(found[len(some) : -len(some)], images[len(some) : -len(some)])
