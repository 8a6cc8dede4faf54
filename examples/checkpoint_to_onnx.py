"""From a timm checkpoint file to a folded, accelerated, verified ONNX file, in one command.

You learn `fathoms export --accelerate --fold`: it reads a .pth in a process of its own, where nothing in it
can run; replaces timm's talking heads and class attention by faster forms; folds LayerScale and the norms' affine parts
into the matrices; and compares the written file with timm's model before it gets its name.

    pip install '.[timm,onnx]'
    python examples/checkpoint_to_onnx.py
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import timm
import torch

MODEL = "cait_xxs24_224"


def write_checkpoint(path: Path) -> torch.nn.Module:
    """A checkpoint as timm's train.py writes it: the weights among what training needs to go on."""
    torch.manual_seed(0)
    model = timm.create_model(MODEL, num_classes=10).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Off their start, as after training: a LayerScale of 1e-5 would hide what its branch computes.
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    torch.save({"epoch": 399, "arch": MODEL, "state_dict": model.state_dict()}, path)
    return model


if __name__ == "__main__":
    folder = Path("from_timm")
    folder.mkdir(exist_ok=True)
    original = write_checkpoint(folder / "model_best.pth")

    command = f"export {folder}/model_best.pth --model timm/{MODEL}"
    command += f" --accelerate --fold --output {folder}/model.onnx --overwrite"
    print(f"$ fathoms {command}")
    subprocess.run([sys.executable, "-m", "fathoms", *command.split()], check=True)

    # The command has compared them already; once more by hand, at a batch size of our own.
    images = torch.randn(3, 3, 224, 224)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (logits,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        expected = original(images).numpy()
    print(
        f"largest difference from timm, by hand: {np.abs(logits - expected).max() / np.abs(expected).max():.1e}"
    )

    card = json.loads((folder / "model.onnx.json").read_text())
    print(
        f"{card['accelerated']} modules accelerated, {card['folded']} scales folded; preprocessing of timm:"
    )
    for step in card["preprocessing"]["steps"]:
        print(f"  - {step}")
