"""What an exported file holds beside the model: nothing of the machine that wrote it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

import fathoms
from fathoms.exporting.verified_export import export_model


@pytest.mark.parametrize(("format", "ending"), [("onnx", ".onnx"), ("torch-export", ".pt2")])
def test_a_file_has_no_path_of_the_machine_that_wrote_it(format, ending, tmp_path):
    model = fathoms.create_model("vit_digits", depth=1).eval()
    path = tmp_path / f"m{ending}"
    export_model(model, path, format)
    if format == "torch-export":
        with zipfile.ZipFile(path) as archive:
            held = b"".join(archive.read(name) for name in archive.namelist())
    else:
        held = path.read_bytes()
        # What is not weights is a twentieth of them in a model of 24 such blocks.
        assert len(held) < 4 * sum(p.numel() for p in model.parameters()) + 16_000
    for folder in (Path(fathoms.__file__).parent, Path(torch.__file__).parent, Path.home()):
        assert str(folder).encode() not in held
