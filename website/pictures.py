"""Make the pictures of docs/images from real runs: `python website/pictures.py`.

One sweep of `fathoms probe`, the page of a run on the digits, and the page of the comparison in results/, the last two
photographed by Chromium. It takes about two minutes on two quiet cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SIZE = (1100, 820)


def fathoms(*words: str) -> None:
    """Run one command of the library."""
    subprocess.run([sys.executable, "-m", "fathoms", *words], check=True)


def photograph(page: Path, picture: Path) -> None:
    """The top of a page as a PNG of 256 colours, which keeps it small; those of thin lines must be among them."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("pictures: no Chromium to photograph pages with; install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "page.png"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE[0]},{SIZE[1]}"]
        command = [
            chromium,
            *options,
            f"--user-data-dir={folder}/profile",
            f"--screenshot={shot}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        few = Image.open(shot).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE)
        few.save(picture, optimize=True)


def main() -> None:
    """Write every picture."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        sweep = ("--depths", "12,24,48,96", "--axis", "residual=none,layerscale,completep")
        fathoms("probe", *sweep, "--figures", folder)
        shutil.copyfile(Path(folder) / "sweep.svg", IMAGES / "depths.svg")
        fathoms("train", "--output", folder, "--experiment", "digits")
        photograph(Path(folder) / "digits" / "report.html", IMAGES / "run_page.png")
    photograph(ROOT / "results" / "compare" / "stem_patch8" / "report.html", IMAGES / "comparison_page.png")


if __name__ == "__main__":
    main()
