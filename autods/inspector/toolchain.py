"""Checks of the software: versions, the compiler, and each DeepSpeed op that a rung needs."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..config.releases import ReleaseFault, find_faults
from ..devices import CPU
from ..errors import EnvironmentBroken
from ..rank.ops import USUAL_BUILD_S
from ..report.results.doctor import Check
from ..system.host import installed_versions
from ..system.processes import ask_module

_LIMIT_S = 300.0
_NEEDED_FOR = {
    "cpu_adam": "offloading the optimizer to the CPU or NVMe",
    "async_io": "NVMe",
    "fused_adam": "configs that ask for DeepSpeed's FusedAdam",
}
_ONLY_ON_CARDS = ("fused_adam",)


def check_versions(versions: Callable[[], Mapping[str, str]] = installed_versions) -> Iterator[Check]:
    """The packages that a fit needs."""
    for name, version in versions().items():
        if version == "not installed":
            yield Check.broken("Software", name, version, f"pip install {name}")
        else:
            yield Check.ok("Software", name, version)
        if name == "deepspeed":
            yield from (grade_fault(fault, version) for fault in find_faults(version) if fault.is_by_stage)


def grade_fault(fault: ReleaseFault, version: str) -> Check:
    """A known fault of this release of DeepSpeed."""
    grade = Check.broken if fault.effect == "wrong" else Check.warning
    return grade("Software", f"deepspeed {version}", f"{fault.symptom} ({fault.source})", fault.remedy)


def check_compiler(which: Callable[[str], str | None] = shutil.which) -> Iterator[Check]:
    """What builds the ops: a C++ compiler, Python's headers and ninja."""
    compiler = os.environ.get("CXX", "g++")
    result = which(compiler)
    if result is None:
        text = f"{compiler} is not installed; forecasts and offloading need it"
        yield Check.broken("Software", "compiler", text, "apt-get install g++")
    else:
        yield Check.ok("Software", "compiler", result)
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        text = "Python.h is missing; no op can be built"
        yield Check.broken("Software", "headers", text, "apt-get install python3-dev")
    installed = Path(sys.executable).with_name("ninja")
    if which("ninja") is None and not installed.exists():
        yield Check.broken("Software", "ninja", "not installed", "pip install ninja")


def check_ray(measure: Callable[[], float]) -> Iterator[Check]:
    """Whether Ray starts and runs a task. `measure` does it and returns the seconds."""
    try:
        result = f"starts and runs a task in {measure():.1f} s"
    except EnvironmentBroken as error:
        problem, _, remedy = str(error).partition("\n")
        yield Check.broken("Software", "Ray", problem, remedy.strip())
    else:
        yield Check.ok("Software", "Ray", result)


def check_ops(*, has_cards: bool, build: bool, note: Callable[[str], None] = lambda text: None) -> Iterator[Check]:
    """Whether each op is built, or can be. With `build` they are built now, one after the other."""
    names = [name for name in USUAL_BUILD_S if has_cards or name not in _ONLY_ON_CARDS]
    try:
        state = _ask(["state", *names], has_cards=has_cards)
    except RuntimeError as error:
        yield Check.broken("DeepSpeed ops", "all", str(error), "python -m deepspeed.env_report")
        return
    for name in names:
        problem, built = state[name]["problem"], state[name]["built"]
        purpose = f"for {_NEEDED_FOR[name]}"
        if problem is not None:
            text, _, rest = problem.partition(" (")
            yield Check.broken("DeepSpeed ops", name, f"{text}; it is {purpose}", rest.rstrip(")"))
        elif built:
            yield Check.ok("DeepSpeed ops", name, f"built, {purpose}")
        elif build:
            note(f"building {name}, about {USUAL_BUILD_S[name]} s")
            yield _build(name, has_cards=has_cards)
        else:
            text = f"not built yet, {purpose}: a trial builds it when it needs it (about {USUAL_BUILD_S[name]} s)"
            yield Check.warning("DeepSpeed ops", name, text, "autods doctor --fix")


def _build(name: str, *, has_cards: bool) -> Check:
    try:
        seconds = _ask(["build", name], has_cards=has_cards, limit_s=3600.0)[name]["seconds"]
    except RuntimeError as error:
        return Check.broken("DeepSpeed ops", name, f"could not be built: {error}")
    return Check.ok("DeepSpeed ops", name, f"built in {seconds:.0f} s")


def _ask(words: list[str], *, has_cards: bool, limit_s: float = _LIMIT_S) -> dict[str, dict[str, Any]]:
    """Ask `rank.ops` in a process of its own: DeepSpeed chooses a device for its whole process.

    Raises RuntimeError with the last line of what that process printed.
    """
    variables = {} if has_cards else CPU.launch_variables
    answer: dict[str, dict[str, Any]] = ask_module("autods.rank.ops", *words, variables=variables, limit_s=limit_s)
    return answer
