"""The public names of fathoms.train, which are imported when first used."""

from __future__ import annotations

import subprocess
import sys

import fathoms.train


def test_every_public_name_can_be_imported():
    assert {"Job", "Recipe", "RunOptions", "Trainer"} <= set(dir(fathoms.train))
    assert dir(fathoms.train) == sorted(fathoms.train.__all__)
    assert all(getattr(fathoms.train, name).__name__ == name for name in fathoms.train.__all__)


def test_a_job_is_described_without_importing_torch():
    code = "import sys; from fathoms.train import Job, Recipe, RunOptions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
