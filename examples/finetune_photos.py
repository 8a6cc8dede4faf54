"""Fine-tune on a folder of photos: one folder for each class, nothing else to write.

You learn the shape of a data set (train/CLASS/*.jpg, val/CLASS/*.jpg), `fathoms data check`, and how weights of another
task start a run: position embeddings are resized, and `--initial-head new` draws a fresh classifier.

    python examples/finetune_photos.py                  # the two photographs that come with scikit-learn, in pieces
    python examples/finetune_photos.py MY_PHOTOS/       # your own; then also try
    fathoms train MY_PHOTOS/ --recipe finetune --model vit_tiny_patch16_224 --initial-head new
        --initial-checkpoint timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k
"""

import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

SMALL = "--recipe cifar --depth 4 --dim 64 --heads 4 --epochs 3 --warmup-epochs 1 --device cpu"


def write_photos(folder: Path) -> None:
    """Pieces of two photographs as a data set of two classes; the right quarter of each is held out."""
    rng = np.random.default_rng(0)
    for name, pixels in zip(("temple", "flower"), load_sample_images().images, strict=True):
        height, width, _ = pixels.shape
        for split, first, last, count in (("train", 0, 0.7, 100), ("val", 0.75, 1, 40)):
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                side = int(rng.integers(64, 120))
                left, top = (
                    rng.integers(int(first * width), int(last * width) - side),
                    rng.integers(height - side),
                )
                piece = Image.fromarray(pixels[top : top + side, left : left + side])
                piece.save(place / f"{number:03}.jpg", quality=90)


def fathoms(command: str) -> None:
    """Run a command of fathoms, and show it."""
    print(f"$ fathoms {command}")
    subprocess.run([sys.executable, "-m", "fathoms", *shlex.split(command)], check=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("photos")
    if len(sys.argv) == 1:
        write_photos(folder)
    photos = shlex.quote(str(folder))
    fathoms(f"data check {photos}")
    # Without a network a model trained here, on the digits, stands in for pretrained weights.
    fathoms(f"train --experiment start {SMALL} --image-size 8")
    start = "--initial-checkpoint runs/start --initial-head new"
    tuned = "--recipe finetune --epochs 3 --warmup-epochs 1 --image-size 32 --batch-size 25 --device cpu"
    fathoms(f"train {photos} --experiment tuned {tuned} {start}")
    fathoms(f"validate {photos} --checkpoint runs/tuned")
