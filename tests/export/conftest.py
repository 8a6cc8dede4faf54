"""A run folder to export from and predict with."""

from __future__ import annotations

import pytest

from fathoms.cli.main import main


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory):
    """One block, trained on the digits for a moment."""
    output = tmp_path_factory.mktemp("runs")
    words = ["--epochs", "3", "--depth", "1", "--lr", "3e-3", "--warmup-epochs", "0", "--device", "cpu"]
    assert main(["train", "--output", str(output), "--experiment", "digits", *words]) == 0
    return output / "digits"
