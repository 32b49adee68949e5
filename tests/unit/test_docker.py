"""The Dockerfile of examples/: Docker runs nowhere here, so its instructions are held beside the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "examples" / "Dockerfile").read_text().replace("\\\n", " ")
INSTRUCTIONS = [line.split(maxsplit=1) for line in TEXT.splitlines() if line and not line.startswith("#")]


def test_its_base_is_one_release_with_a_compiler() -> None:
    (base,) = [rest for name, rest in INSTRUCTIONS if name == "FROM"]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-devel-ubuntu\d\d\.04", base)


@pytest.mark.parametrize("copied", [rest for name, rest in INSTRUCTIONS if name == "COPY"])
def test_what_it_copies_is_there(copied: str) -> None:
    *sources, _ = copied.split()
    assert all((ROOT / source).exists() for source in sources)


def test_the_packages_are_those_that_set_up_needs() -> None:
    packages = re.search(r"install -y --no-install-recommends ([^&]+)", TEXT)
    assert packages is not None
    needed = set(re.findall(r"^need ([^\n]+?) --", (ROOT / ".ci" / "packages").read_text(), flags=re.MULTILINE))
    needed = {name for names in needed for name in names.split()}
    assert needed - {"make"} <= set(packages[1].split())


def test_what_is_installed_is_the_tested_versions() -> None:
    installs = re.findall(r"pip install [^&\n]+", TEXT)
    assert len(installs) == 2
    assert all("--constraint constraints.txt" in install for install in installs)
