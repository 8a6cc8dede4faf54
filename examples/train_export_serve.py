"""Train, export, serve: from the digits to a file that onnxruntime serves without fathoms.

You learn the way of a model out of the laboratory: `fathoms train`, `fathoms export --fold`, and `serve.py`, which has
numpy, Pillow, onnxruntime and the card of the file, nothing else. Its probabilities are those of `fathoms predict`.

    pip install '.[onnx]'
    python examples/train_export_serve.py
"""

import json
import subprocess
import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

FILES = [f"scan_{letter}.png" for letter in "abcdefgh"]


def run(*words: str) -> str:
    """Run fathoms, or the program beside this one; show the command, return what it prints."""
    print("$", *words)
    program = ["-m", "fathoms"] if words[0] == "fathoms" else [Path(__file__).with_name(words[0])]
    done = subprocess.run(
        [sys.executable, *program, *words[1:]], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout


if __name__ == "__main__":
    pictures = load_digits().images[1500:]
    for file, pixels in zip(FILES, pictures, strict=False):
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(file)

    run("fathoms", "train", "--epochs", "12", "--depth", "4", "--experiment", "digits", "--device", "cpu")
    print(run("fathoms", "export", "runs/digits", "--fold", "--output", "digits.onnx", "--overwrite"))

    served = json.loads(run("serve.py", "digits.onnx", *FILES))
    printed = run("fathoms", "predict", *FILES, "--checkpoint", "runs/digits", "--top", "1", "--json")
    for ours, theirs in zip(served, json.loads(printed)["predictions"], strict=True):
        print(f"{ours['file']}: {ours['class']} with {ours['probability']:.1%}")
        assert ours["class"] == theirs["classes"][0]
        assert abs(ours["probability"] - theirs["probabilities"][0]) < 1e-4
    print("the same as fathoms predict, to four digits")
