"""Train, export, serve: from the digits to a file that onnxruntime serves without fathoms.

You learn the way of a model out of the laboratory: `fathoms train`, `fathoms export --fold`, and `serve.py`, which has
numpy, Pillow, onnxruntime and the card of the file, nothing else. Its probabilities are those of `fathoms predict`.

    pip install 'fathoms[onnx]'
    python examples/train_export_serve.py
"""

import json
import subprocess
import sys
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

FILES = [f"digit_{number}.png" for number in range(8)]


def run(*words: str) -> str:
    """Run a Python program, show its command, and return what it prints."""
    print("$", *(("fathoms", *words[1:]) if words[0] == "-m fathoms" else ("python", *words)))
    program = words[0].split()
    done = subprocess.run([sys.executable, *program, *words[1:]], check=True, capture_output=True, text=True)
    return done.stdout


if __name__ == "__main__":
    pictures = load_digits().images[1500:]
    for file, pixels in zip(FILES, pictures, strict=False):
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(file)

    run("-m fathoms", "train", "--epochs", "8", "--depth", "4", "--experiment", "digits", "--device", "cpu")
    print(run("-m fathoms", "export", "runs/digits", "--fold", "--output", "digits.onnx", "--overwrite"))

    served = json.loads(run(str(Path(__file__).with_name("serve.py")), "digits.onnx", *FILES))
    printed = run("-m fathoms", "predict", *FILES, "--checkpoint", "runs/digits", "--top", "1", "--json")
    predicted = [json.loads(line) for line in printed.splitlines()]
    for ours, theirs in zip(served, predicted, strict=True):
        print(f"{ours['file']}: {ours['class']} with {ours['probability']:.1%}")
        assert ours["class"] == theirs["classes"][0]
        assert abs(ours["probability"] - theirs["probabilities"][0]) < 1e-4
    print("the same as fathoms predict, to four digits")
