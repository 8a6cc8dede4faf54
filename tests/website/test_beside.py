"""The table beside other libraries: our cells link to tests and count what is registered, theirs have versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fathoms.parts import families

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "beside.md").read_text()
HERE = {
    cells[0]: cells[1:]
    for cells in (line.strip("| ").split(" | ") for line in PAGE.partition("## What is here")[2].splitlines())
    if len(cells) == 6 and set(cells[0]) != {"-"}
}
COUNTED = {
    "norms for ViTs by name": "norm",
    "residual rules": "residual",
    "norm placements": "attn_placement",
    "Dual PatchNorm, other patch norms": "stem_norm",
}


def test_every_feature_of_ours_links_to_a_test_that_exists():
    assert len(HERE) > 15
    for feature, (ours, *_) in HERE.items():
        linked = re.findall(r"\]\(\.\./(tests/[\w/]+\.py)\)", ours)
        assert linked, feature
        assert all("\ndef test_" in (ROOT / path).read_text() for path in linked), feature


@pytest.mark.parametrize("feature", list(COUNTED))
def test_the_numbers_of_parts_are_those_of_the_registry(feature):
    assert int(re.search(r"\d+", HERE[feature][0])[0]) == len(families()[COUNTED[feature]])


def test_each_of_the_others_is_named_with_the_version_looked_at():
    about = PAGE.partition("\n## ")[0]
    for other in (
        r"timm \d+\.\d+\.\d+",
        r"deit at [0-9a-f]{7}",
        r"vit-pytorch\s\d+\.\d+",
        r"x-transformers \d+\.\d+",
    ):
        assert re.search(other, about), other
