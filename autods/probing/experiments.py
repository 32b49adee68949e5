"""Experiments: axes in a file, to be measured on any workload and machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..folders import data_folder
from ..toml_files import checked, read_toml
from .axes import split


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Axes by name, as the file has them."""

    name: str
    vary: Mapping[str, tuple[Any, ...]]
    title: str = ""


def read_experiment(name: str) -> Experiment:
    """A shipped experiment by name, or any TOML file by path. Raises InputError."""
    folder = data_folder("configs") / "experiments"
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(item.stem for item in folder.glob("*.toml")))
        raise InputError(f"there is no experiment {name!r}", mend=f"give one of {known}, or the path of a .toml file")
    mend = f"compare with {folder / 'stages.toml'}"
    return checked(Experiment, read_toml(path), _check, name="experiment", where=str(path), mend=mend)


def _check(experiment: Experiment) -> None:
    if not experiment.vary or not all(experiment.vary.values()):
        raise ValueError("vary needs an axis, and each axis a value")


def with_experiment(
    name: str | Path | None, vary: Sequence[str] | Mapping[str, Iterable[Any]]
) -> Sequence[str] | Mapping[str, Iterable[Any]]:
    """The experiment's axes, then those that were asked for; one of the same name takes its place."""
    if name is None:
        return vary
    given = vary if isinstance(vary, Mapping) else _by_name(vary)
    axes = read_experiment(str(name)).vary
    return {**axes, **given}


def _by_name(lines: Sequence[str]) -> dict[str, Any]:
    """'NAME=A,B' by name; what is no such line is refused where axes are read."""
    named: dict[str, Any] = {}
    for name, values in map(split, lines):
        if name in named:
            raise InputError(f"--vary {name} was given twice", mend="give all its values at once: NAME=A,B,C")
        named[name] = values
    return named
