from pathlib import Path

import pytest

from autods.devices import Card
from autods.devices.base import CardReading
from autods.devices.torch_build import TorchBuild, explain_unusable, read_torch_build


@pytest.mark.parametrize(
    ("lines", "version", "cuda"),
    [
        ("__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
         "2.11.0+cu130", (13, 0)),
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", "2.13.0+cpu", None),
        ("__version__ = '2.9.1+cu126'\ncuda: str | None = '12.6'\n", "2.9.1+cu126", (12, 6)),
    ],
)  # fmt: skip
def test_torch_says_which_cuda_it_was_built_with(
    tmp_path: Path, lines: str, version: str, cuda: tuple[int, int] | None
) -> None:
    (tmp_path / "version.py").write_text(f"from typing import Optional\n{lines}")
    build = read_torch_build(tmp_path)
    assert build is not None
    assert (build.version, build.cuda) == (version, cuda)


def test_a_torch_that_cannot_be_read_is_no_problem(tmp_path: Path) -> None:
    assert read_torch_build(tmp_path) is None


def test_a_torch_for_amds_cards_is_told_and_lacks_no_cuda(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(
        "__version__ = '2.11.0+rocm7'\ncuda: str | None = None\nhip: str | None = '7'\n"
    )
    build = read_torch_build(tmp_path)
    assert build == TorchBuild(version="2.11.0+rocm7", cuda=None, rocm=True)
    card = Card(index=0, name="A100", total_bytes=1, free_bytes=1)
    assert "built without CUDA" in (explain_unusable(CardReading(cards=(card,)), build) or "")
    assert explain_unusable(CardReading(), build) is None
