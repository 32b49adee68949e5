"""What an engine hardly ever runs, and so does not have to wait for: half the seconds of its imports.

For the zygote and for the simulated engine. A rank whose model is compiled has all of it, a little later.

A module that is put off is there under its name. The few names that are used all the time are answered at once;
whoever asks for any other has the whole module loaded then, and notices nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_COMPILER = "torch._dynamo"
_SOLVERS = "scipy.optimize"
_COMPILES = re.compile(r"dynamo|(?<!\bre)\.compile\b|import .*\bcompile\b")  # torch.compile, model.compile(), …
_IMPORTER = "<frozen importlib"


def install() -> None:
    """In this process, after torch is imported and before anything else is."""
    import torch

    # Functions that torch keeps out of its compiler import it at their first call, transformers while it is imported.
    allowed: list[Any] = []

    def allow(function: Any) -> Any:
        allowed.append(function)  # the compiler is told, should it come after all
        return function

    answers: dict[str, Any] = {
        "disable": _uncompiled, "graph_break": _nothing, "assume_constant_result": _constant,
        "allow_in_graph": allow,
        "trace_rules": {"clear_lru_cache": _nothing},
        "source": {"ConstantSource": str, "RandomValueSource": _Unknown},  # where a tensor comes from: no fake one says
    }  # fmt: skip
    parts = ("config", "_trace_wrapped_higher_order_op")
    put_off(_COMPILER, answers, with_parts=parts, then=lambda compiler: _loaded(compiler, allowed))
    torch._dynamo = sys.modules[_COMPILER]
    put_off(_SOLVERS, {"linear_sum_assignment": _assign})  # transformers imports it for object detection
    sys.meta_path.insert(0, _Once("transformers.utils.import_utils", exports_from_the_end))


def with_the_compiler(do: Callable[[], object]) -> None:
    """Do this as soon as torch's compiler is loaded, which may be never; now, if it is."""
    if _COMPILER in _later:
        _waiting.append(do)
    else:
        do()


def _loaded(compiler: Any, allowed: list[Any]) -> None:
    compiler.allow_in_graph(allowed)
    for do in _waiting:
        do()
    _waiting.clear()


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Functions that are decorated with torch.compile inside are compiled when they are first called."""
    import torch

    own = torch.compile

    def later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(later, **options)
        if not isinstance(model, types.FunctionType):
            return own(model, **options)
        made: list[Any] = []

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not made:
                made.append(own(model, **options))
            return made[0](*args, **kwargs)

        return call

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = own


def load_what_is_named(*files: str) -> bool:
    """Load the compiler now if a file or a module of the user's names it; whether one does.

    In a rank it would load late, and on CPU ranks, whose budget is all memory of the process, at the cost of the model.
    """
    named = any(_COMPILES.search(_text(file)) for file in {*files, *_users_files()})
    if named:
        _load(_COMPILER)
    return named


def _users_files() -> list[str]:
    """Of what is imported, what was not installed."""
    paths = sysconfig.get_paths()
    installed = tuple({paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
    files = [vars(module).get("__file__") for module in list(sys.modules.values()) if module is not None]
    ours = str(Path(__file__).parents[1])
    return [file for file in files if isinstance(file, str) and not file.startswith((*installed, ours))]


def _text(file: str) -> str:
    try:
        return Path(file).read_text(errors="ignore") if file.endswith(".py") else ""
    except OSError:
        return ""


def put_off(
    name: str,
    answers: Mapping[str, Any],
    *,
    with_parts: tuple[str, ...] = (),
    then: Callable[[Any], object] = lambda module: None,
) -> None:
    """Load this module when a name is asked that is not in `answers`, and do `then` with it.

    with_parts: submodules to load now. A dict as an answer: of a submodule that is put off, too. Nothing happens where
    the module is loaded already or not installed.
    """
    if name in sys.modules or (spec := _spec(name)) is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    for part in with_parts:
        with contextlib.suppress(ImportError):  # another version may lack it
            importlib.import_module(f"{name}.{part}")
    for part, inner in answers.items():
        if isinstance(inner, dict):
            put_off(f"{name}.{part}", inner)
    answers = {key: sys.modules[f"{name}.{key}"] if isinstance(one, dict) else one for key, one in answers.items()}
    place = vars(module).pop("__path__", None)
    vars(module).update(answers)

    def load() -> None:
        _load(name.rpartition(".")[0])
        if _later.pop(name, None) is None:
            return  # the package imported it
        module.__class__ = types.ModuleType
        for answered, one in answers.items():
            if not isinstance(one, types.ModuleType):  # submodules stay
                vars(module).pop(answered, None)
        if place is not None:
            module.__path__ = place
        assert spec.loader is not None
        spec.loader.exec_module(module)
        then(module)

    _later[name] = load
    module.__class__ = _PutOff


def _load(name: str) -> None:
    if load := _later.get(name):
        load()


_later: dict[str, Callable[[], None]] = {}  # of what is still put off
_waiting: list[Callable[[], object]] = []  # for the compiler


class _PutOff(types.ModuleType):
    """A module until something is asked of it that needs its code."""

    def __getattr__(self, name: str) -> Any:
        # The import system asks for __path__ before it imports a submodule, which may need the whole module. Others who
        # ask for such names look at every loaded module, or import a name from this one.
        by = sys._getframe(1).f_code.co_filename
        if name.startswith("__") and not (name == "__path__" and by.startswith(_IMPORTER)):
            raise AttributeError(name)
        _load(self.__name__)
        return getattr(self, name)


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ImportError:
        return None


class _Once(importlib.abc.MetaPathFinder):
    """Changes a module as soon as it is imported."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """As importlib has it; the loader of this one module does the change."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module

            def load(module: Any) -> None:
                own(module)
                self._change(module)

            spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


def exports_from_the_end(module: Any) -> None:
    """transformers looks for __all__ in all lines of all its models' files; the last one counts."""
    own = getattr(module, "fetch__all__", None)
    if own is None:
        return

    def fetch(content: str) -> Any:
        return own(content[content.rfind("\n__all__") + 1 :])

    module.fetch__all__ = fetch


class _Unknown:
    """No tensor's source."""


def _assign(*args: Any, **kwargs: Any) -> Any:
    _load(_SOLVERS)
    return sys.modules[_SOLVERS].linear_sum_assignment(*args, **kwargs)


def _uncompiled(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch._dynamo.disable`: the function itself while nothing is compiled, and the compiler's once it is there."""
    if function is None:
        return functools.partial(_uncompiled, **kwargs)
    if not isinstance(function, types.FunctionType | types.MethodType):
        return sys.modules[_COMPILER].disable(function, *args, **kwargs) if _COMPILER not in _later else function
    made: list[Any] = []

    @functools.wraps(function)
    def call(*inner: Any, **named: Any) -> Any:
        if _COMPILER in _later:
            return function(*inner, **named)
        if not made:
            made.append(sys.modules[_COMPILER].disable(function, *args, **kwargs))
        return made[0](*inner, **named)

    return call


def _constant(function: Any) -> Any:
    """`torch._dynamo.assume_constant_result`: the compiler sees the mark, should it come after all."""
    function._dynamo_marked_constant = True
    return function


def _nothing(*args: Any, **kwargs: Any) -> None:
    """`torch._dynamo.graph_break` and what else only a compiler needs."""
