"""Serve an exported model with numpy, Pillow and onnxruntime: no fathoms, no torch.

Everything it needs is in the card next to the file: resize, crop, mean, std, the names of the classes.

    python examples/serve.py model.onnx photo.jpg ...
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

FILTERS = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def prepare(file: str, steps: dict, channels: int) -> np.ndarray:
    """An image file as the model's input, (1, channels, height, width), by the card's steps."""
    image = ImageOps.exif_transpose(Image.open(file)).convert("RGB")
    short, (height, width) = steps["resize_shorter_side"], steps["crop"]
    scale = short / min(image.size)
    size = tuple(short if side == min(image.size) else int(side * scale) for side in image.size)
    image = image.resize(size, FILTERS[steps["interpolation"]])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / steps["divide_by"]
    if channels == 1:
        pixels = pixels.mean(-1, keepdims=True)
    mean, std = (np.array(steps[name][:channels], np.float32) for name in ("mean", "std"))
    return ((pixels - mean) / std).transpose(2, 0, 1)[None]


def serve(model: str, files: list[str]) -> list[dict]:
    """The likeliest class of each file, with its probability."""
    card = json.loads(Path(f"{model}.json").read_text())
    session = onnxruntime.InferenceSession(model)
    answers = []
    for file in files:
        images = prepare(file, card["preprocessing"], card["input"][0])
        (logits,) = session.run(None, {session.get_inputs()[0].name: images})
        shares = np.exp(logits[0] - logits[0].max())
        best = int(shares.argmax())
        probability = float(shares[best] / shares.sum())
        answers.append({"file": file, "class": card["classes"][best], "probability": probability})
    return answers


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python examples/serve.py model.onnx photo.jpg ...")
    print(json.dumps(serve(sys.argv[1], sys.argv[2:]), indent=2))
    assert "torch" not in sys.modules
    assert "fathoms" not in sys.modules
