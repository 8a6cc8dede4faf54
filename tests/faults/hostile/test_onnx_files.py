"""ONNX files from strangers: no other file is opened, every refusal is one line, and no graph runs for ever."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fathoms.evaluating import onnx_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FLOAT = 1
IMAGES = ("images", FLOAT, ["b", 3, 8, 8])
LOGITS = ("logits", FLOAT, ["b", 10])
WEIGHTS = onnx.numpy_helper.from_array(np.ones((192, 10), np.float32), "w")


def node(kind, inputs, outputs, **attributes):
    return onnx.helper.make_node(kind, inputs, outputs, **attributes)


def array(name, values, kind=np.int64):
    return onnx.numpy_helper.from_array(np.array(values, kind), name)


FLAT = node("Flatten", ["images"], ["f"])
PRODUCT = node("MatMul", ["f", "w"], ["x"])
LINEAR = [FLAT, node("MatMul", ["f", "w"], ["logits"])]
CAST = [node("Cast", ["images"], ["i"], to=FLOAT), node("Flatten", ["i"], ["f"]), LINEAR[1]]


def external(location: str):
    """The weights as a tensor of another file."""
    tensor = onnx.TensorProto(name="w", data_type=FLOAT, dims=[192, 10], data_location=1)
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location
    return tensor


def endless():
    """A graph whose loop never ends."""
    value = onnx.helper.make_tensor_value_info
    inside = [node("Identity", ["c"], ["co"]), node("Identity", ["v"], ["vo"])]
    taken = [value("i", 7, []), value("c", 9, []), value("v", FLOAT, None)]
    body = onnx.helper.make_graph(inside, "b", taken, [value("co", 9, []), value("vo", FLOAT, None)])
    return [FLAT, PRODUCT, node("Loop", ["", "t", "x"], ["logits"], body=body)]


def write(path, nodes, initializers=(), images=IMAGES, logits=LOGITS):
    """An ONNX file of these nodes."""
    made = [
        each if not isinstance(each, tuple) else onnx.helper.make_tensor_value_info(*each)
        for each in (images, logits)
    ]
    graph = onnx.helper.make_graph(nodes, "g", made[:1], made[1:], list(initializers))
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    model.ir_version = 9
    path.write_bytes(model.SerializeToString())


NONE = array("e", np.zeros((0, 10)), np.float32)
ONE = array("e", np.zeros((1, 10)), np.float32)
TEXTS = onnx.helper.make_tensor("s", 8, [1, 10], [b"a"] * 10)
SEQUENCE = onnx.helper.make_tensor_sequence_value_info("logits", FLOAT, ["b", 3, 8, 8])
NAN = array("z", np.nan, np.float32)
MANY = [
    node("ConstantOfShape", ["n"], ["c"]),
    node("ReduceSum", ["c"], ["sum"], keepdims=0),
    node("Add", ["x", "sum"], ["logits"]),
]
NO_PIXELS = ("images", FLOAT, ["b", 3, 0, 0])
FILES = {
    "weights beside it": ((LINEAR, [external("secret.bin")]), "in another file"),
    "weights above it": ((LINEAR, [external("../secret.bin")]), "in another file"),
    "a constant beside it": (
        ([node("Constant", [], ["w"], value=external("secret.bin")), *LINEAR],),
        "in another file",
    ),
    "a terabyte": (
        (
            [FLAT, PRODUCT, *MANY],
            [WEIGHTS, array("n", [2**40])],
        ),
        "cannot be run",
    ),
    "a hundred billion rows": (
        (
            [FLAT, PRODUCT, node("ReduceMean", ["x"], ["m"]), node("Expand", ["m", "n"], ["logits"])],
            [WEIGHTS, array("n", [10**11, 10])],
        ),
        "cannot be run",
    ),
    "texts": (
        ([node("Identity", ["s"], ["logits"])], [TEXTS], IMAGES, ("logits", 8, [1, 10])),
        "not float32",
    ),
    "a number": (
        ([node("ReduceSum", ["images"], ["logits"], keepdims=0)], [], IMAGES, ("logits", FLOAT, [])),
        "gives",
    ),
    "a sequence": (
        ([node("SequenceConstruct", ["images"], ["logits"])], [], IMAGES, SEQUENCE),
        "not float32",
    ),
    "bytes in": ((CAST, [WEIGHTS], ("images", 2, ["b", 3, 8, 8])), "not float32 images"),
    "halves in": ((CAST, [WEIGHTS], ("images", 10, ["b", 3, 8, 8])), "not float32 images"),
    "no rows": (
        ([node("Identity", ["e"], ["logits"])], [NONE], IMAGES, ("logits", FLOAT, [0, 10])),
        "not a row each",
    ),
    "no pixels": (
        ([node("Identity", ["e"], ["logits"])], [ONE], NO_PIXELS),
        "not float32 images",
    ),
    "an exabyte in": (
        ([node("Identity", ["e"], ["logits"])], [ONE], ("images", FLOAT, ["b", 3, 10**9, 10**9])),
        "not float32 images",
    ),
    "not a number": (([FLAT, PRODUCT, node("Mul", ["x", "z"], ["logits"])], [WEIGHTS, NAN]), "not finite"),
    "a loop without end": ((endless(), [WEIGHTS, array("t", True, bool)]), "cannot be run (more than"),
}


@pytest.fixture
def beside(place, monkeypatch):
    """A folder with a file that a graph may name, an image, and labelled images."""
    monkeypatch.setattr(onnx_model, "SECONDS", 0.5)
    monkeypatch.setattr(onnx_model, "SECONDS_AN_IMAGE", 0.5)
    for folder in (place, place.parent):
        (folder / "secret.bin").write_bytes(np.ones((192, 10), np.float32).tobytes())
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(place / "a.png")
    labels, pixels = np.arange(20) % 10, np.zeros((20, 8, 8, 3), np.uint8)
    np.savez(place / "d.npz", x_train=pixels, y_train=labels, x_val=pixels, y_val=labels)
    return place


@pytest.mark.parametrize("kind", FILES)
def test_an_onnx_file_that_is_no_classifier_is_refused_in_one_line(kind, beside, refused):
    written, says = FILES[kind]
    write(beside / "m.onnx", *written)
    refused("predict", "a.png", "--checkpoint", "m.onnx", says=says)
    refused("validate", "d.npz", "--checkpoint", "m.onnx", says=says)


def test_an_onnx_file_of_batches_of_one_size_is_run_in_those(beside):
    import torch

    write(beside / "any.onnx", LINEAR, [WEIGHTS])
    images = torch.randn(5, 3, 8, 8)
    wanted = onnx_model.OnnxModel(beside / "any.onnx")(images)
    for batch in (1, 2):
        write(
            beside / "m.onnx",
            LINEAR,
            [WEIGHTS],
            ("images", FLOAT, [batch, 3, 8, 8]),
            ("logits", FLOAT, [batch, 10]),
        )
        assert torch.allclose(onnx_model.OnnxModel(beside / "m.onnx")(images), wanted, atol=1e-5)
