"""The factors of step time that trials have shown on a machine, kept for its later fits."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ..config.catalogue import Machine
from ..errors import AutodsError
from ..files import as_folder_name, read_file
from ..forecast.predict.calibration import StepFactors
from ..schema import read_as
from ..system.host import cache_folder

FILE = "step_factors.json"


def identify(machine: Machine, *, ranks_per_node: int, nodes: int) -> str:
    """Return what step times depend on, as a name: the cards, how many a fit uses, the links between them, the nodes.

    Fits on fewer cards of a node have another name, for the links are slower or faster with fewer at work.
    """
    parts = [f"{ranks_per_node}x {machine.title}"]
    if machine.links is not None and ranks_per_node > 1:
        parts.append(machine.links.between_gpus)
    if nodes > 1:
        network = None if machine.links is None else machine.links.network
        parts.append(f"{nodes} nodes, {network or 'network'}")
    return ", ".join(parts)


def open_factors(machine: str, out: Path, report: Callable[[str], None]) -> StepFactors:
    """Return the factors with which the fit in `out` begins: those that earlier fits on such a machine have left.

    `machine` is the name of `identify`.

    The first call writes them into `out`. A resumed fit reads them there, so that it decides as its first run did.
    `report` is told of a file that cannot be used.
    """
    known = _read(out / FILE, report) or _read(_machine_file(machine), report) or StepFactors()
    _write(out / FILE, known)
    return known


def keep_factors(machine: str, factors: StepFactors) -> None:
    """Keep the factors for later fits on such a machine. Nothing is kept where the user's cache cannot be written."""
    _write(_machine_file(machine), factors)


def _machine_file(machine: str) -> Path:
    return cache_folder() / "step_factors" / f"{as_folder_name(machine)}.json"


def _read(path: Path, report: Callable[[str], None]) -> StepFactors | None:
    if not path.exists():
        return None
    try:
        factors = read_as(StepFactors, json.loads(read_file(path)))
        if not all(0 < factor < 100 for factor in asdict(factors).values()):
            raise ValueError("a factor is not between 0 and 100")
        return factors
    except (AutodsError, ValueError) as error:
        report(f"{path} is not used: {' '.join(str(error).split())}")
        return None


def _write(path: Path, factors: StepFactors) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(factors)) + "\n")
        os.replace(temporary, path)
