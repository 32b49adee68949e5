"""What a probe is asked: checked once, then trusted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from ..catalogue import Machine
from ..checks import Given, base_of, check_ranks, global_batch_of
from ..errors import InputError
from ..folders import data_folder
from ..hardware import Hardware
from ..ladder import Rung, all_rungs, choose
from ..profile import read_profile
from ..question import nvme_place
from ..settings import Settings, resolve
from ..values import Steps, WorkloadSource
from .axes import Axis, Value, axes_of
from .checks import Arguments, check_argument, check_packed, check_twice

MOST_CELLS = 1000
REPEATS = 3
PLAINEST = "ddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One probe. `settings` are those of the most ranks; its ladder holds the rungs that are varied.

    repeats: how often each cell is measured. capacity: look for the largest micro batch of each cell. parallel: cells
    that are searched for it at a time. forecast_only: without a trial, for `machine`. as_written: buckets are the base
    config's, or DeepSpeed's own, and not sized as a fit would start. machine: what is forecast for; None: this one.
    assumed: what nobody said, in sentences.
    """

    settings: Settings
    axes: tuple[Axis, ...]
    repeats: int
    steps: Steps
    capacity: bool = False
    parallel: int = 1
    forecast_only: bool = False
    as_written: bool = False
    machine: Machine | None = None
    assumed: tuple[str, ...] = ()

    def cells(self) -> Iterable[dict[str, Value]]:
        """Axis → value of each cell; the last axis changes fastest."""
        for values in product(*(axis.values for axis in self.axes)):
            yield dict(zip((axis.name for axis in self.axes), values, strict=True))

    def fingerprint(self) -> str:
        """Equal for probes whose trials answer each other's; more repeats go on with those that are there."""
        axes = [asdict(axis) for axis in self.axes]
        said = [
            self.settings.fingerprint(),
            axes,
            asdict(self.steps),
            self.capacity,
            self.as_written,
            repr(self.machine),
        ]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def pose(
    source: WorkloadSource,
    arguments: Arguments,
    *,
    hardware: Hardware,
    vary: Sequence[str] | Mapping[str, Iterable[Any]] = (),
    gpus: Sequence[int] = (),
    repeats: int | None = None,
    steps: int | None = None,
    capacity: bool = False,
    parallel_trials: int = 1,
    machine: Machine | None = None,
    as_written: bool = False,
    base_config: Given = None,
    config: str = "default",
    ladder: tuple[str, ...] = (),
    strategies: tuple[Path, ...] = (),
    out: str | Path | None = None,
    **asked: Any,
) -> Question:
    """Check what was asked. `asked`: the rest, as `settings.resolve` takes it. Raises InputError.

    arguments: what the workload's functions take. ladder: the rungs, where no axis names them. machine: one that need
    not be here; it is forecast for, and `hardware` has to be its own.
    """
    capacity = capacity or machine is not None
    folders = (experiment_rungs(), *strategies)
    rungs = all_rungs(folders)
    axes = _with_gpus(axes_of(vary, rungs), gpus)
    if ladder and any(axis.name == "rung" for axis in axes):
        raise InputError("--ladder and an axis both say the rungs", mend="give them once: --vary rung=…")
    axes, assumed = _with_rung(axes, _rungs_of(ladder, rungs, config, capacity=capacity))
    named = {axis.name: axis.values for axis in axes}
    check_twice(named, source, asked, capacity=capacity)
    for name in named:
        check_argument(name, source, arguments)
    counts = [count for count in named.get("gpus", gpus) if isinstance(count, int)]
    nvme_path = asked.pop("nvme_path", None) if machine is not None else None  # it need not be here
    settings = resolve(
        source, hardware=hardware, gpus=max(counts, default=None), base_config=base_config, config=config,
        ladder=tuple(str(name) for name in named["rung"]), strategies=folders, **asked,
    )  # fmt: skip
    for count in counts:  # a base config, or a global batch, may suit some and not others
        base, _ = base_of(source.base_config if base_config is None else base_config, world_size=count)
        global_batch_of(asked.get("global_batch"), base, count)
        check_packed(count, settings)
    if machine is not None:
        settings = replace(settings, nvme_path=nvme_place(nvme_path, machine))
    question = Question(
        settings=_patient(settings) if capacity else settings,
        axes=axes,
        repeats=_at_least_one(repeats, "--repeats", 1 if capacity else REPEATS),
        steps=_steps(settings, steps, capacity=capacity),
        capacity=capacity,
        parallel=_parallel(parallel_trials, capacity=capacity and machine is None),
        forecast_only=machine is not None,
        as_written=as_written,
        machine=machine,
        assumed=assumed,
    )
    if (count := prod(len(axis.values) for axis in axes)) > MOST_CELLS:
        raise InputError(
            f"--vary asks for {count:,} cells", mend=f"give fewer values; {MOST_CELLS:,} cells are the most"
        )
    name = f"{source.name}-probe-{question.fingerprint()[:6]}"
    folder = (Path(out) if out is not None else Path("autods-out") / name).absolute()
    return replace(question, settings=replace(question.settings, out=folder))


def experiment_rungs() -> Path:
    """Rungs beside the ladder that experiments compare; any probe may name them."""
    return data_folder("configs") / "experiments" / "strategies"


def _with_gpus(axes: tuple[Axis, ...], gpus: Sequence[int]) -> tuple[Axis, ...]:
    """Several numbers of ranks are an axis, however they are given."""
    if any(axis.name == "gpus" for axis in axes):
        if gpus:
            raise InputError("--vary gpus=… and --gpus both say the ranks", mend="drop one of the two")
        return axes
    for count in gpus:
        check_ranks(count)
    return (Axis(name="gpus", values=tuple(dict.fromkeys(gpus))), *axes) if len(set(gpus)) > 1 else axes


def _rungs_of(ladder: tuple[str, ...], rungs: Mapping[str, Rung], config: str, *, capacity: bool) -> tuple[str, ...]:
    """The rungs where no axis names any; of an experiment, where nobody named any, the plainest."""
    if not ladder and not capacity:
        return ()
    return tuple(rung.name for rung in choose(ladder or read_profile(config).ladder, rungs))


def _with_rung(axes: tuple[Axis, ...], names: tuple[str, ...]) -> tuple[tuple[Axis, ...], tuple[str, ...]]:
    """Every cell has a rung; what was assumed for it."""
    if any(axis.name == "rung" for axis in axes):
        return axes, ()
    assumed = () if names else (f"rung {PLAINEST} (--vary rung=…)",)
    return (Axis(name="rung", values=names or (PLAINEST,)), *axes), assumed


def _steps(settings: Settings, asked: int | None, *, capacity: bool) -> Steps:
    """How long a trial is: the config's, or so many timed steps."""
    steps = settings.profile.walk if capacity else settings.profile.timed
    if asked is None:
        return steps
    count = _at_least_one(asked, "--steps", 1)
    return replace(steps, timed=count, most_timed=count)


def _parallel(trials: int, *, capacity: bool) -> int:
    """Only trials that are not timed may run side by side."""
    if trials > 1 and not capacity:
        raise InputError(
            f"--parallel-trials {trials}: trials of a probe are timed, and would slow each other down",
            mend="drop it, or ask for --capacity, whose trials only show what fits",
        )
    return _at_least_one(trials, "--parallel-trials", 1)


def _patient(settings: Settings) -> Settings:
    """The largest micro batch may take minutes for one phase: that alone is no hang."""
    limits = settings.profile.limits
    return replace(settings, profile=replace(settings.profile, limits=replace(limits, stall_s=limits.init_s)))


def _at_least_one(asked: int | None, option: str, otherwise: int) -> int:
    if asked is not None and asked < 1:
        raise InputError(f"{option} {asked}: at least one is needed")
    return otherwise if asked is None else asked
