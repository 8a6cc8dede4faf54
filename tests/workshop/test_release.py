"""The release: one version and date everywhere, and a core that installs few packages."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import fathoms
from fresh_machine import CORE_MB

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What `pip install fathoms` brings besides what these need themselves. A new one must earn its place here.
CORE = {
    "jaxtyping",
    "jinja2",
    "matplotlib",
    "numpy",
    "pillow",
    "rich",
    "safetensors",
    "scipy",
    "simplejpeg",
    "torch",
    "tyro",
}
CORE_PACKAGES = 23
"""Number of these and of all packages that they need, beside torch and its own dependencies."""


def names(requirements):
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}


def test_the_version_is_written_once_and_the_package_is_built_with_it():
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert ROOT / PROJECT["tool"]["hatch"]["version"]["path"] == ROOT / "src" / "fathoms" / "version.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", fathoms.__version__)


def test_changelog_and_citation_name_this_version_and_its_date():
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == fathoms.__version__
    citation = dict(
        re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    )
    assert citation == {"version": newest[1], "date-released": newest[2]}


def test_the_core_needs_these_packages_and_no_others():
    assert names(PROJECT["project"]["dependencies"]) == CORE


def installed_with(name, seen):
    """The names of a distribution and of all that it needs here, without extras; they are added to `seen`."""
    if canonicalize_name(name) in seen:
        return seen
    seen.add(canonicalize_name(name))
    for line in distribution(name).requires or []:
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            installed_with(needed.name, seen)
    return seen


def test_the_core_installs_few_packages_and_megabytes_beside_torch():
    """`tests/fresh_machine.py` measures the same in an empty environment."""
    with_torch = installed_with("torch", set())
    beside = set().union(*(installed_with(name, set()) for name in CORE - {"torch"})) - with_torch
    assert CORE - with_torch <= beside
    assert len(beside) <= CORE_PACKAGES, sorted(beside)
    sizes = {
        name: sum(file.size or 0 for file in distribution(name).files or []) / 1e6 for name in sorted(beside)
    }
    assert CORE_MB / 3 < sum(sizes.values()) <= CORE_MB, sizes


def test_the_core_imports_no_package_of_an_extra():
    """An import at the top of a file needs the package everywhere; one inside of a function only where it is used."""
    extras = PROJECT["project"]["optional-dependencies"]
    optional = {name.replace("-", "_") for kind in extras if kind != "dev" for name in names(extras[kind])}
    # These say in their first lines that they need the extra.
    allowed = {"timm_models.py": {"timm"}}
    for path in (ROOT / "src").rglob("*.py"):
        imported = set(re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE))
        assert imported & optional <= allowed.get(path.name, set()), path
