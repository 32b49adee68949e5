"""Find the fastest DeepSpeed configuration that fits.

`import autods` is quick: what it names is loaded at first use, and torch, DeepSpeed, Ray and Optuna only by a fit.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import doctor as doctor
    from .api import explain as explain
    from .api import find_best_config as find_best_config
    from .api import plan as plan
    from .api import probe as probe
    from .api import run as run
    from .diagnosis import Diagnosis as Diagnosis
    from .diagnosis import diagnose as diagnose
    from .errors import AutodsError as AutodsError
    from .errors import EnvironmentBroken as EnvironmentBroken
    from .errors import InputError as InputError
    from .errors import Interrupted as Interrupted
    from .rank.training_run.session import session as session
    from .report import FitReport as FitReport
    from .workload import Workload as Workload

_HOMES = {
    "Diagnosis": "diagnosis",
    "diagnose": "diagnosis",
    "doctor": "api",
    "explain": "api",
    "find_best_config": "api",
    "plan": "api",
    "probe": "api",
    "run": "api",
    "session": "rank.training_run.session",
    "FitReport": "report",
    "Workload": "workload",
    "AutodsError": "errors",
    "InputError": "errors",
    "EnvironmentBroken": "errors",
    "Interrupted": "errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("autods")
    if name not in _HOMES:
        from difflib import get_close_matches

        near = ["find_best_config"] if name == "fit" else get_close_matches(name, _HOMES, n=1)
        meant = f": did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module 'autods' has no attribute {name!r}{meant}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
