"""The ladder: rungs read from TOML, fastest first. A rung is a row of data; adding one means adding a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import InputError
from ..schema import read_checked, read_toml
from ..system.host import data_folder
from ..types import ModelFacts, Scalar, Tier

State = Literal["parameters", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How a start value follows from the device or the model; exactly one of the two shares is set."""

    device_share: float | None = None
    bytes_each: int = 1
    largest_parameter: float | None = None
    most: int | None = None

    def value(self, *, device_bytes: int, facts: ModelFacts) -> int:
        """Elements, even (ZeRO aligns its partitions to two elements), at least 2."""
        if self.largest_parameter is not None:
            size = facts.largest_parameter * self.largest_parameter
        else:
            assert self.device_share is not None
            size = device_bytes * self.device_share / self.bytes_each
        bounded = min(size, self.most) if self.most else size
        return max(2, int(bounded) // 2 * 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One key that may be tuned: either choices, or a range given as multiples of the start value.

    usual: what DeepSpeed takes when nobody says anything, worth a trial whatever the start is.
    """

    choices: tuple[Scalar, ...] = ()
    low: float = 1.0
    high: float = 1.0
    most: int | None = None
    usual: bool | int | float | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One strategy of the ladder, see `strategies/*.toml`."""

    name: str
    order: int
    title: str
    stage: int
    shards: tuple[State, ...]
    places: Mapping[State, Tier]
    least_world_size: int
    needs_nvme_path: bool
    ds_config: Mapping[str, Any]
    start: Mapping[str, Sizing] = field(default_factory=dict)
    tune: Mapping[str, Dimension] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Needs:
    world_size: int
    nvme_path: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A rung as its TOML file has it."""

    name: str
    order: int
    title: str
    stage: Literal[0, 1, 2, 3]
    shards: tuple[State, ...]
    places: Mapping[State, Tier]
    needs: _Needs
    ds_config: Mapping[str, Any]
    start: Mapping[str, Sizing] = field(default_factory=dict)
    tune: Mapping[str, Dimension] = field(default_factory=dict)


def parse_rung(data: Mapping[str, Any], *, where: str) -> Rung:
    """A rung from its TOML. Raises InputError naming the key that is missing or of the wrong form."""
    file = read_checked(_File, data, _check, name="rung", where=where, hint="compare with strategies/zero3.toml")
    return Rung(
        name=file.name,
        order=file.order,
        title=file.title,
        stage=file.stage,
        shards=file.shards,
        places=file.places,
        least_world_size=file.needs.world_size,
        needs_nvme_path=file.needs.nvme_path,
        ds_config=file.ds_config,
        start=file.start,
        tune=file.tune,
    )


def _check(file: _File) -> None:
    """Raises ValueError for what the types alone allow."""
    for state in get_args(State):
        if state not in file.places:
            raise ValueError(f"places lacks {state!r}")
    for key, sizing in file.start.items():
        if (sizing.device_share is None) == (sizing.largest_parameter is None):
            raise ValueError(f"start.{key} needs either device_share or largest_parameter")
    for key, dimension in file.tune.items():
        if not dimension.choices and key not in file.start:
            raise ValueError(f"tune.{key} is a range, so it needs a start value in [start]")
        if not dimension.choices and not 0 < dimension.low < dimension.high:
            raise ValueError(f"tune.{key} needs choices, or 0 < low < high")
        _check_usual(key, dimension)


def _check_usual(key: str, dimension: Dimension) -> None:
    usual = dimension.usual
    if dimension.choices:
        right = usual is None or any(
            usual is one or (type(usual) is type(one) and usual == one) for one in dimension.choices
        )
        wanted = "one of the choices"
    else:
        right = usual is None or (isinstance(usual, (int, float)) and not isinstance(usual, bool) and usual >= 2)
        wanted = "a number of elements, at least 2"
    if not right:
        raise ValueError(f"tune.{key}.usual is {usual!r}, not {wanted}")


def read_rungs(folders: tuple[Path, ...] = ()) -> Mapping[str, Rung]:
    """Every rung by name, fastest first: those that ship, then those of the user's folders (which win)."""
    found: dict[str, Rung] = {}
    for folder in (data_folder("strategies"), *folders):
        if not folder.is_dir():
            raise InputError(
                "is not a folder of rungs", where=str(folder), hint="give --strategies a folder of .toml files"
            )
        for path in sorted(folder.glob("*.toml")):
            rung = parse_rung(read_toml(path), where=str(path))
            found[rung.name] = rung
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def select_rungs(names: Iterable[str], rungs: Mapping[str, Rung]) -> tuple[Rung, ...]:
    """The named rungs, fastest first. Raises InputError for a name that no rung has."""
    wanted = tuple(names)
    for name in wanted:
        if name not in rungs:
            raise InputError(f"there is no rung {name!r} in the ladder", hint=f"the rungs are: {', '.join(rungs)}")
    if not wanted:
        raise InputError("the ladder is empty", hint=f"name at least one rung of: {', '.join(rungs)}")
    return tuple(sorted((rungs[name] for name in dict.fromkeys(wanted)), key=lambda rung: rung.order))
