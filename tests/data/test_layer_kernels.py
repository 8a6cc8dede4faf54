"""The Triton kernels of a layer against the operations as written, `apply.apply_layer`.

Without a GPU the kernels run in Triton's interpreter. It must be switched on before triton is imported, so this
file is started again as a script, and the tests read what it prints.
"""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
import torch

from fathoms.data.augment import batched as apply
from fathoms.data.augment.geometry import PLANE
from fathoms.data.augment.jitter import draw_jitter
from fathoms.data.augment.policy import LEVELS, Layer, draw_layers, parse_policy
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
SIZES = [(17, 23), (1, 1), (1, 7), (3, 3), (5, 4), (33, 40)]
POLICIES = ("rand-m9-mstd0.5-inc1", "rand-m9-mstd0.5-inc1-n1-p1.0", "3a", "v0")


def noise(count, height, width, device="cpu"):
    """Pictures of random values, one in five in a narrow range and one in five of a single colour."""
    rng = np.random.default_rng(height * 1000 + width)
    values = rng.integers(0, 256, (count, 3, height, width), dtype=np.uint8)
    values[1::5] = values[1::5] // 8 + 90
    values[2::5] = values[2::5, :, :1, :1]
    return torch.from_numpy(values).to(device)


def layer_of(entries):
    """A layer with one picture for each (kind, factor, cubic); no kind: the picture stays."""
    kinds, factors, cubic = zip(*entries, strict=True)
    rows = {kind: np.flatnonzero(np.array(kinds) == kind) for kind in dict.fromkeys(kinds) if kind}
    return Layer(rows, np.array(factors), np.array(cubic))


def one_kind(kind):
    filters = (False, True) if kind in PLANE else (False,)
    entries = [(kind, factor, cubic) for cubic in filters for factor in FACTORS[kind]]
    # Once on every sort of picture `noise` makes, and one picture between that stays.
    return [*entries, ("", 0.0, False), *[entries[-1]] * 4]


def every_kind():
    kinds = {**FACTORS, "": [0.0]}
    return [(kind, factors[-1], cubic) for cubic in (False, True) for kind, factors in kinds.items()]


def drawn(policy, count):
    return draw_layers(parse_policy(policy), np.arange(count, dtype=np.uint64) * 977 + 5)


def cases(count=24, large=(224, 224)):
    """Pictures and layer of each case."""
    for kind in FACTORS:
        layer = layer_of(one_kind(kind))
        yield kind, noise(len(layer.argument), 32, 32), layer
    for height, width in SIZES:
        yield f"{height}x{width}", noise(len(every_kind()), height, width), layer_of(every_kind())
    some = ("rotate", "equalize", "contrast", "auto_contrast", "sharpness")
    layer = layer_of([(kind, FACTORS[kind][-1], True) for kind in some])
    yield "large", noise(len(some), *large), layer
    yield "large blur", noise(1, 96, 96), layer_of([("gaussian_blur", 1.7, False)])
    for policy in POLICIES:
        # Blurs take the interpreter long.
        for number, layer in enumerate(drawn(policy, count // 3 if policy == "3a" else count)):
            yield f"{policy}, layer {number}", noise(len(layer.argument), 32, 32), layer
    for number, layer in enumerate(draw_jitter((0.4, 0.4, 0.4, 0.3), np.arange(12, dtype=np.uint64))):
        yield f"jitter, layer {number}", noise(12, 32, 32), layer
    yield "one picture", noise(1, 32, 32), layer_of([("rotate", 20.0, True)])
    yield "no rows", noise(3, 8, 8), Layer({}, np.zeros(3), np.zeros(3, bool))
    yield "no pictures", noise(0, 8, 8), Layer({}, np.zeros(0), np.zeros(0, bool))
    turned = noise(4, 20, 12).transpose(2, 3)
    yield "not contiguous", turned, layer_of([("equalize", 0.0, False), *[("shear_x", 0.2, True)] * 3])


NAMES = [name for name, *_ in cases(count=2, large=(8, 8))]


def compare(images, layer):
    """Largest difference to the operations as written, and the share of values that differ."""
    from fathoms.data.device.triton.layer import apply_layer

    fill = torch.tensor(FILL, dtype=torch.uint8, device=images.device)
    before = images.clone()
    found = apply_layer(images, layer, fill)
    expected = apply.apply_layer(before.clone(memory_format=torch.contiguous_format), layer, fill)
    difference = (found.int() - expected.int()).abs()
    return {
        "levels": int(difference.max()) if difference.numel() else 0,
        "share": float((difference > 0).double().mean()) if difference.numel() else 0.0,
        "untouched": torch.equal(images, before),
        "same": found is images,
    }


def launched(layer):
    """How often each kernel is started for a layer."""
    from fathoms.data.device.triton import layer as module

    seen, launch = Counter(), module.launch

    def count(kernel, grid, *arguments, **options):
        seen[kernel.fn.__name__] += 1
        launch(kernel, grid, *arguments, **options)

    module.launch = count
    module.apply_layer(noise(len(layer.argument), 2, 4), layer, torch.tensor(FILL, dtype=torch.uint8))
    module.launch = launch
    return seen


def interpreted():
    """Run every case through the kernels, in this process."""
    from fathoms.data.device.triton import layer as module

    tile, part = module.TILE, module.PART
    found = {}
    for name, images, layer in cases():
        # The interpreter takes as long for a small tile as for a large one; one case has the tiles of the device.
        module.TILE = 16 * tile if name == "large" else tile
        module.PART = part if name == "33x40" else module.TILE
        found[name] = compare(images, layer)
    module.TILE, module.PART = tile, part
    report = {
        "cases": found,
        "launches": {policy: launched(drawn(policy, 12)[0]) for policy in POLICIES},
        "kinds": list(module.CODES),
    }
    print(json.dumps(report))


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_kernels_give_the_same_bytes(report, name):
    found = report["cases"][name]
    # A sum that another processor fuses otherwise may be cut off on the other side of a whole number.
    assert found["levels"] <= 1, found
    assert found["share"] <= 1e-4, found


@pytest.mark.parametrize("name", NAMES)
def test_the_given_pictures_are_left_alone(report, name):
    assert report["cases"][name]["untouched"]
    assert report["cases"][name]["same"] == (name in ("no rows", "no pictures"))


def test_a_layer_takes_two_launches_and_a_blur_one_more(report):
    assert report["launches"]["rand-m9-mstd0.5-inc1"] == {"table_kernel": 1, "layer_kernel": 1}
    assert report["launches"]["3a"] == {"table_kernel": 1, "layer_kernel": 1, "blur_kernel": 1}


def test_every_operation_of_a_policy_has_a_code(report):
    kinds = {operation.kind for operation in LEVELS.values()} | {"hue"}
    assert kinds <= set(report["kinds"]) == set(FACTORS)


def test_a_cpu_is_refused_with_the_reason():
    module = pytest.importorskip("fathoms.data.device.triton.layer", reason="triton is not installed")
    with pytest.raises(BackendError, match="apply_layer: the Triton kernels cannot run: x is on cpu"):
        module.apply_layer(noise(1, 4, 4), layer_of([("invert", 0.0, False)]), torch.zeros(3).byte())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_kernels_give_the_same_bytes():
    for name, images, layer in cases(count=512, large=(224, 224)):
        found = compare(images.cuda(), layer)
        # torch divides by a number and multiplies and adds in one rounding on some devices.
        assert found["levels"] <= 1, (name, found)
        assert found["share"] <= 1e-3, (name, found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("count", "size"), [(4096, 32), (64, 224), (16, 384)], ids=str)
def test_device_kernels_agree_on_whole_batches(policy, count, size):
    for layer in drawn(policy, count):
        found = compare(noise(count, size, size, "cuda"), layer)
        assert found["levels"] <= 1, found
        assert found["share"] <= 1e-3, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_kernels_reach_pictures_beyond_two_to_the_31_bytes():
    from fathoms.data.device.triton.layer import apply_layer

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


if __name__ == "__main__":
    interpreted()
