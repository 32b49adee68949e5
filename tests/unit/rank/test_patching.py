"""Patches of other libraries: replaced, put back, and refused with the version where a symbol is gone."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import json.decoder
import sys
import types
from pathlib import Path

import pytest

from autods.rank.patching import Patch, SymbolMissing, declare, declare_all, declared, find_original, when_imported


def patch(symbol: str, *, optional: bool = False) -> Patch:
    return Patch(symbol=symbol, why="it is only a test", optional=optional)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library with a base class, a class and a function."""
    module = types.ModuleType("somelib")

    class Base:
        def inherited(self) -> str:
            return "real"

    class Child(Base):
        def run(self) -> str:
            return "real"

    module.Child = Child  # type: ignore[attr-defined]
    module.function = lambda: "real"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somelib", module)
    return module


def test_install_returns_the_former_value(library: types.ModuleType) -> None:
    former = patch("somelib.Child.run").install(lambda self: "ours")
    assert library.Child().run() == "ours"
    assert former(library.Child()) == "real"


def test_a_block_puts_an_inherited_symbol_back(library: types.ModuleType) -> None:
    with patch("somelib.Child.inherited").installed(lambda self: "ours"):
        assert library.Child().inherited() == "ours"
    assert library.Child().inherited() == "real"
    assert "inherited" not in vars(library.Child)


def test_a_wrapper_gets_its_context_and_the_original(library: types.ModuleType) -> None:
    patch("somelib.Child.run").wrap(lambda context, original, child: f"{context} {original(child)}", "not so")
    patch("somelib.absent", optional=True).wrap(lambda original: "ours")
    assert library.Child().run() == "not so real"
    assert library.Child.run.__name__ == "run"
    assert not hasattr(library, "absent")


def test_inspect_shows_the_function_that_was_replaced(library: types.ModuleType) -> None:
    library.write, library.read = json.dumps, json.loads  # type: ignore[attr-defined]
    for symbol in ("somelib.write", "somelib.read"):
        patch(symbol).install(_nothing)  # one function stands for two
    for replaced, real in ((library.write, json.dumps), (library.read, json.loads)):
        assert replaced("1") is None
        assert inspect.getsource(replaced) == inspect.getsource(real)
        assert inspect.signature(replaced) == inspect.signature(real)
        assert replaced.__name__ == real.__name__
    patch("somelib.Child.run").wrap(lambda original, child: "ours")
    assert find_original(library.Child.run).__code__.co_filename == __file__
    assert find_original(pytest.fixture) is pytest.fixture


def _nothing(*args: object) -> None:
    return None


def test_names_imported_elsewhere_follow(library: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    user = types.ModuleType("user")
    user.function = library.function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "user", user)
    patch("somelib.function").install(lambda: "ours", everywhere=True)
    assert user.function() == "ours"


@pytest.mark.parametrize("symbol", ["pytest.nothing", "pytest.no_module.nothing"])
def test_a_missing_symbol_names_version_and_reason(symbol: str) -> None:
    with pytest.raises(SymbolMissing) as missing:
        patch(symbol).install(None)
    first = str(missing.value).splitlines()[0]
    assert first == f"pytest {pytest.__version__} has no {symbol}, which autods replaces: it is only a test"


@pytest.mark.parametrize("symbol", ["pytest.nothing", "pytest.no_module.nothing"])
def test_an_absent_optional_symbol_is_left_alone(symbol: str) -> None:
    with patch(symbol, optional=True).installed(1) as former:
        assert former is None
    assert patch(symbol, optional=True).install(1) is None
    assert not hasattr(pytest, "nothing")


def test_a_patch_that_adds_its_symbol_needs_the_owner(library: types.ModuleType) -> None:
    Patch(symbol="somelib.added", why="a test", adds=True).install(1)
    assert library.added == 1
    with pytest.raises(SymbolMissing):
        Patch(symbol="somelib.nothing.added", why="a test", adds=True).install(1)


def test_annotated_attributes_of_instances_count(library: types.ModuleType) -> None:
    library.Child.__annotations__ = {"size": int}
    patch("somelib.Child.size").install(3)
    assert library.Child().size == 3


def test_declared_patches_are_listed() -> None:
    ours = declare("json.decoder.JSONDecoder.decode", "a test")
    several = declare_all("json", ("loads", "dumps"), "a test")
    assert {ours, *several.values()} <= set(declared())
    assert several["dumps"].original() is json.dumps


def test_a_library_that_cannot_be_imported_tells_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = "def __getattr__(name):\n try:\n  1 / 0\n except ArithmeticError as e:\n  raise ImportError(name) from e\n"
    (tmp_path / "lazylib.py").write_text(lazy)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SymbolMissing, match=r"cannot import lazylib\.Trainer: ZeroDivisionError: division by zero"):
        patch("lazylib.Trainer.train").original()


@pytest.mark.parametrize("name", ["otherlib", "otherlib.part"])
def test_an_action_runs_once_its_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "otherlib").mkdir()
    (tmp_path / "otherlib" / "__init__.py").write_text("")
    (tmp_path / "otherlib" / "part.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    actions: list[object] = []
    try:
        when_imported(name, lambda: actions.append(vars(sys.modules[name]).get("value")))
        assert actions == []
        module = importlib.import_module("otherlib.part")
        assert actions == [module.value if name == "otherlib.part" else None]
        when_imported(name, lambda: actions.append("at once"))
        assert actions[1:] == ["at once"]
    finally:
        for imported in ("otherlib", "otherlib.part"):
            sys.modules.pop(imported, None)


def test_looking_for_a_module_does_not_import_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sought.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    actions: list[str] = []
    when_imported("sought", lambda: actions.append("imported"))
    for _ in range(2):  # libraries ask so whether another one is installed
        assert importlib.util.find_spec("sought") is not None
    assert actions == []
    importlib.import_module("sought")
    assert actions == ["imported"]
    monkeypatch.delitem(sys.modules, "sought")
    importlib.import_module("sought")
    assert actions == ["imported"]
