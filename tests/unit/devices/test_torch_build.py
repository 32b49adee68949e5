from pathlib import Path

import pytest

from autods.devices.torch_build import read_torch_build


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


def test_an_unreadable_or_rocm_torch_is_no_problem(tmp_path: Path) -> None:
    assert read_torch_build(tmp_path) is None
    (tmp_path / "version.py").write_text(
        "__version__ = '2.11.0+rocm7'\ncuda: str | None = None\nhip: str | None = '7'\n"
    )
    assert read_torch_build(tmp_path) is None
