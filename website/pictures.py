"""Make the pictures of docs/images from real runs: `python website/pictures.py`.

Figures that commands write, and the pages of a run on the digits and of the comparison in results/, photographed by
Chromium. It takes about four minutes on two quiet cores.
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
INSIDE = "--residual layerscale --residual-init 0.1 --depth 8 --patch-size 1 --epochs 12"
"""The run that the gallery looks into."""


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
        places = [f"--user-data-dir={folder}/profile", f"--screenshot={shot}", page.as_uri()]
        subprocess.run([chromium, *options, *places], check=True, capture_output=True, timeout=120)
        few = Image.open(shot).convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE)
        few.save(picture, optimize=True)


def main() -> None:
    """Write every picture."""
    with tempfile.TemporaryDirectory() as folder:
        output = ("--output", folder, "--experiment")
        fathoms("compare", *output, "first")
        for name, picture in (("scores", "first_comparison"), ("cost-training-time", "accuracy_by_time")):
            shutil.copyfile(f"{folder}/first/figures/{name}.svg", IMAGES / f"{picture}.svg")
        fathoms("train", *output, "inside", *INSIDE.split())
        fathoms("probe", f"{folder}/inside", "--figures", folder)
        for name in ("depth", "scales", "attention"):
            for kind in ("svg", "json"):
                shutil.copyfile(f"{folder}/{name}.{kind}", IMAGES / f"{name}.{kind}")
        photograph(Path(folder) / "inside" / "report.html", IMAGES / "run_page.png")
        compared = shutil.copytree(ROOT / "results" / "compare" / "stem_patch8", Path(folder) / "stem_patch8")
        fathoms("report", str(compared))
        photograph(compared / "report.html", IMAGES / "comparison_page.png")


if __name__ == "__main__":
    main()
