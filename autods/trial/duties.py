"""What a rank may be asked to do: train, look at the workload, build ops. A script does the first two in its way."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..ds_config import get
from ..workload import Workload, bound, load, partitioned
from .meter import CpuMeter
from .observer import Observer
from .seeds import seed_all
from .spec import Job, RankJob

Result = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Duty:
    """The job of one rank, and what it is done with. slot: its place on this node.

    store: the socket that rank 0 serves. workload: as the zygote loaded it, if it could. leave: ends this process with
    a result, or an error, where the user's code does not let itself be ended.
    """

    job: RankJob
    slot: int
    observer: Observer
    store: socket.socket | None
    workload: Workload | None
    leave: Callable[[Result | BaseException], NoReturn]

    @property
    def seed(self) -> int:
        """Ranks draw different data; where losses are compared, samples have seeds of their own and weights a common
        one."""
        job = self.job
        return job.seed if job.exam == "parity" else job.seed + job.local_ranks[self.slot]


def done(duty: Duty) -> Result:
    """The result of the rank, as plain values."""
    ways = _OF_A_SCRIPT if duty.job.source.kind == "script" else _WAYS
    return ways[duty.job.job](duty)


def _survey(duty: Duty) -> Result:
    from .survey import survey

    duty.observer("build", 0)
    facts = survey(_loaded(duty))
    return {"facts": facts, "op_problems": _op_problems(duty.job)}


def _op_problems(job: RankJob) -> dict[str, str]:
    from .ops import problem

    return {op: text for op in job.ops if (text := problem(op))}


def _ops(duty: Duty) -> Result:
    from .ops import build

    duty.observer("build", 0)
    for op in duty.job.ops:
        build(op)
    return {}


def _train(duty: Duty) -> Result:
    from .act import act
    from .rendezvous import join, ranks_of

    job, observer = duty.job, duty.observer
    seed_all(duty.seed)
    observer.meter.start()
    observer("rendezvous", 0)
    join(job, duty.slot, duty.store)
    built = _loaded(duty)
    if job.source.zero_init and job.exam != "parity" and get(job.ds_config, "zero_optimization.stage") == 3:
        built = partitioned(built, job.ds_config)
    acted = act(
        built,
        ds_config=job.ds_config,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        checkpointing=job.checkpointing,
        only_build=job.only_build,
        steps=job.steps,
        observe=observer,
        synchronize=observer.meter.synchronize,
        ease=observer.meter.ease if isinstance(observer.meter, CpuMeter) else None,
        ranks=ranks_of(job, duty.slot),
        exam=job.exam,
        examined_from_s=job.examined_from_s,
        scratch=Path(job.checkpoints or job.scratch),
        seed=job.seed,
    )
    tells = job.device == "cpu" and job.replica_ranks == 1
    return {
        "step_s": acted.step_s,
        "update_share": observer.update_share(acted.step_s) if tells else None,
        "steps_s": acted.steps_s,
        "losses": acted.losses,
        "examined": acted.examined,
        "communication": acted.communication,
        **_beside(observer),
    }


def _loaded(duty: Duty) -> Workload:
    if duty.workload is None:
        return load(duty.job.source)
    return bound(duty.workload, duty.job.source) if duty.job.rebind else duty.workload


def _survey_script(duty: Duty) -> Result:
    from .ops import clear_killed_builds

    problems = _op_problems(duty.job)
    clear_killed_builds()
    return _run_script(duty, lambda facts: {"facts": facts, "op_problems": problems})


def _train_script(duty: Duty) -> Result:
    seed_all(duty.seed)
    duty.observer.meter.start()
    return _run_script(duty, lambda seen: {**_beside(duty.observer), **seen})


def _run_script(duty: Duty, told: Callable[[Result], Result]) -> Result:
    """Run the script as `__main__`. told: from what was seen of it to the result."""
    from .script.run import run

    def leave(end: Result | BaseException) -> NoReturn:
        duty.leave(end if isinstance(end, BaseException) else told(end))

    return told(run(duty.job, duty.slot, duty.observer, duty.store, leave))


def _beside(observer: Observer) -> dict[str, Any]:
    """What stands beside the steps in the result of a training rank."""
    return {
        "build_s": observer.build_s,
        "init_s": observer.init_s,
        "peaks": observer.meter.peaks() | observer.in_steps,
    }


_WAYS: Mapping[Job, Callable[[Duty], Result]] = {"train": _train, "survey": _survey, "ops": _ops}
_OF_A_SCRIPT: Mapping[Job, Callable[[Duty], Result]] = {**_WAYS, "train": _train_script, "survey": _survey_script}
