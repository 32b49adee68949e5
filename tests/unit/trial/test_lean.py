from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from autods.trial import lean

PACKAGE = """
from .part import VALUE
loaded = True
def answer(): return "the real one"
def other(): return VALUE
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "put_off_for_a_test"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(PACKAGE)
    (tmp_path / name / "part.py").write_text("VALUE = 42\nclass Source: pass\n")
    (tmp_path / name / "settings.py").write_text("COLOUR = 'blue'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for one in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[one]
    lean._later.clear()


def loaded(name: str) -> bool:
    return "loaded" in vars(sys.modules[name])


def put_off(name: str, told: list[object] | None = None) -> None:
    answers = {"answer": lambda: "at once", "part": {"Source": str}}
    lean.put_off(name, answers, with_parts=("settings",), then=(told if told is not None else []).append)


def test_what_is_put_off_answers_without_being_loaded(package: str) -> None:
    put_off(package)
    module = importlib.import_module(package)
    scope: dict[str, object] = {}
    exec(f"from {package} import answer; from {package}.settings import COLOUR; import {package}.settings", scope)
    exec(f"from {package}.part import Source", scope)
    assert (module.answer(), scope["COLOUR"], scope["Source"]) == ("at once", "blue", str)
    assert not hasattr(module, "__wrapped__")  # as tools ask that look at every module
    assert not loaded(package)


def test_another_name_loads_the_whole_module_in_its_place(package: str) -> None:
    told: list[object] = []
    put_off(package, told)
    module = importlib.import_module(package)
    assert module.other() == 42
    assert module.answer() == "the real one"
    assert type(module.part).__name__ == "module"
    assert isinstance(module.part.Source, type)
    assert module.part.Source is not str
    assert told == [module]


def test_a_part_that_is_asked_for_more_loads_its_package_first(package: str) -> None:
    put_off(package)
    assert importlib.import_module(f"{package}.part").VALUE == 42
    assert loaded(package)


def test_a_submodule_is_not_imported_without_its_package(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "more.py").write_text("from . import loaded\n")
    put_off(package)
    assert importlib.import_module(f"{package}.more").loaded is True
    assert loaded(package)


def test_what_is_not_installed_is_not_pretended_to_be(package: str) -> None:
    lean.put_off("there_is_no_such_module.here", {"answer": 1})
    assert "there_is_no_such_module.here" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("there_is_no_such_module.here")


def test_the_last_list_of_exports_is_found_from_the_end() -> None:
    asked: list[str] = []
    module = SimpleNamespace(fetch__all__=lambda content: asked.append(content))
    lean.exports_from_the_end(module)
    for content in ('__all__ = ["A"]', 'x = 1\n__all__ = []\ny\n__all__ = [\n"B"\n]\n', "# says __all__\nx\n"):
        module.fetch__all__(content)
    assert asked == ['__all__ = ["A"]', '__all__ = [\n"B"\n]\n', "# says __all__\nx\n"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("net = torch.compile(net)", True),
        ("net.compile()", True),
        ("from torch import nn, compile", True),
        ("import torch._dynamo", True),
        ("import re\nNUMBER = re.compile('[0-9]+')", False),
        ("model = build()", False),
    ],
)
def test_a_users_file_that_names_the_compiler_is_told_from_one_that_does_not(
    tmp_path: Path, text: str, named: bool
) -> None:
    (tmp_path / "model.py").write_text(text)
    assert bool(lean._COMPILES.search(text)) is named
    if named:
        assert lean.load_what_is_named(str(tmp_path / "model.py"))


def test_a_users_module_that_is_imported_is_looked_at_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "helper_of_a_test.py").write_text("import types\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "helper_of_a_test", importlib.import_module("helper_of_a_test"))
    assert str(tmp_path / "helper_of_a_test.py") in lean._users_files()
    assert not [file for file in lean._users_files() if "site-packages" in file]
