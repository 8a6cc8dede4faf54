"""Fixtures of the comparison tests."""

import pytest

from tiny_comparisons import Comparisons


@pytest.fixture
def comparisons(tmp_path, monkeypatch):
    """Comparisons on the digits, with one thread a worker."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Comparisons(tmp_path / "runs")
