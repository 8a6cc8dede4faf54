"""What mypy and pyright know of fathoms, as somebody who uses it: a page of code has no error, a planted one has."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).with_name("page_of_code.py")
CHECKERS = {
    "mypy": ["mypy", "--no-incremental", "--follow-imports=silent", "--cache-dir=/dev/null"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", list(CHECKERS))
def test_a_page_of_code_has_no_error_and_a_planted_one_has(tmp_path, checker):
    if importlib.util.find_spec(checker) is None:
        pytest.skip("needs pip install -e .[dev]")
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(PAGE.read_text())
    bad.write_text("import fathoms\n\nwrong: int = fathoms.train().path\nfathoms.judge(1, baselin='a')\n")
    found = {}
    # Installed or not, the package under test is the one that is read.
    source = str(Path(__file__).parents[2] / "src")
    for page in (good, bad):
        line = [sys.executable, "-m", *CHECKERS[checker], str(page)]
        paths = {"MYPYPATH": source, "PYTHONPATH": source}
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **paths})
        found[page.name] = done.stdout + done.stderr
        assert done.returncode == (0 if page == good else 1), found[page.name]
    assert found["bad.py"].count("error") >= 2
