"""Run trials on Ray: one agent a node, which owns the zygote that forks the ranks."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.deepspeed import compose, required_ops, without_monitors
from ..config.strategies import Rung
from ..diagnosis.trial_outcome import input_error
from ..errors import AutodsError, EnvironmentBroken, InputError
from ..events import Event, Listener, Note, TrialMoved
from ..requests import Settings, describe_script, with_workloads_config
from ..trial.job import Job, RankJob
from ..trial.ops import BUILDERS, USUAL_BUILD_S
from ..types import Failed, Fit, Knobs, ModelFacts, Outcome, Record, Trial, WorkloadSource
from .nodes import Nodes
from .outcome import failure_from, outcome_from
from .worker_group import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The jobs of a runner. facts: None before the survey. loaded: the workload that the zygotes hold.

    mark: of this driver, beside others that swap into one folder. own: of this runner, beside others that write logs.
    """

    settings: Settings
    facts: ModelFacts | None
    loaded: WorkloadSource
    mark: str
    own: str = ""

    def survey(self) -> RankJob:
        """What the workload is, and which of the ladder's ops cannot be had; on one rank."""
        settings = self.settings
        rungs = [rung for rung in settings.ladder if not rung.needs_nvme_path or settings.nvme_path]
        ops = tuple(dict.fromkeys(op for rung in rungs for op in required_ops(self._native_config(rung))))
        if settings.source.kind == "script":
            ops = tuple(BUILDERS)  # its config is not known yet
        return self._job(
            "survey",
            f"survey{self.own}",
            ops=ops,
            ds_config=self._native_config(settings.ladder[0]),
            stall_s=settings.profile.limits.init_s,
        )

    def on_all_ranks(self, job: RankJob) -> RankJob:
        """The same for as many ranks as there are."""
        return replace(job, world_size=self.settings.gpus, local_ranks=tuple(range(self.settings.gpus)))

    def with_more_samples(self, job: RankJob) -> RankJob:
        """The same with twice the micro batch."""
        size = 2 * job.micro_batch
        return replace(job, micro_batch=size, ds_config={**job.ds_config, "train_micro_batch_size_per_gpu": size})

    def training(self, trial: Trial, id: int) -> RankJob:
        """The trial itself."""
        assert self.facts is not None, "survey first"
        settings, config = self.settings, without_monitors(self._config(trial, self._swap()))
        return self._job(
            "train",
            f"{id:03d}-{trial.rung}",
            ds_config=config,
            world_size=settings.gpus,
            replica_ranks=self.facts.replica_ranks,
            local_ranks=tuple(range(settings.gpus)),
            micro_batch=trial.knobs.micro_batch,
            accumulation=trial.knobs.accumulation,
            checkpointing=trial.knobs.checkpointing,
            steps=trial.steps,
            exam=trial.exam,
            limit_bytes=settings.device_bytes if trial.limited and settings.device_bytes_asked else None,
            seed=settings.seed,
            swap=str(self._swap()) if "async_io" in required_ops(config) else None,
        )

    def building(self, op: str) -> RankJob:
        """Build and load one of DeepSpeed's ops."""
        limit = self.settings.profile.limits.build_s
        return self._job("ops", f"build-{op}{self.own}", ops=(op,), init_s=limit, wall_s=limit)

    def loading(self) -> RankJob:
        """What a zygote does before any job, for what is said of its failure."""
        return self._job("survey", "survey")

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""
        return self._config(trial, self.settings.nvme_path)

    def _job(self, kind: Job, name: str, **said: Any) -> RankJob:
        limits = self.settings.profile.limits
        folder = self.settings.out / "logs" / name
        return RankJob(
            job=kind,
            source=self.settings.source,
            rebind=self.settings.source != self.loaded,
            device=self.settings.device,
            threads=self.settings.threads,
            folder=str(folder),
            scratch=str(folder / "scratch"),
            **{"stall_s": limits.stall_s, "init_s": limits.init_s, "wall_s": limits.wall_s, **said},
        )

    def _swap(self) -> Path | None:
        path = self.settings.nvme_path
        return path / f"autods-{self.mark}" if path else None

    def _config(self, trial: Trial, nvme_path: Path | None) -> dict[str, Any]:
        assert self.facts is not None, "survey first"
        return compose(
            next(rung for rung in self.settings.ladder if rung.name == trial.rung),
            trial.knobs,
            base=self.settings.base,
            world_size=self.facts.replicas(self.settings.gpus),
            own_optimizer=self.facts.has_optimizer,
            nvme_path=nvme_path,
        )

    def _native_config(self, rung: Rung) -> dict[str, Any]:
        return compose(
            rung, Knobs(), base=self.settings.base, world_size=self.settings.gpus, own_optimizer=False, nvme_path=Path()
        )


def check_ready(ready: Report, job: RankJob, log: Path, listen: Listener) -> None:
    """ready: what a zygote says when it has loaded everything. job: whose failure it would be.

    Raises InputError where the workload is at fault, EnvironmentBroken where the machine is.
    """
    if "error" in ready:
        failure = failure_from([ready], job)
        assert failure is not None
        raise _unusable(failure, job, log)
    if "died" in ready:
        raise EnvironmentBroken(f"torch and DeepSpeed could not be loaded ({ready['died']})\n  see {log}")
    if ready.get("unfit"):
        # Never a silent fall-back: each trial now pays for its own imports.
        listen(Note(text=f"ranks start as new processes, some 10 s slower a trial: {ready['unfit']}"))


def check_survey(failure: Outcome | None, job: RankJob) -> None:
    """Raises as `check_ready` does."""
    if failure is not None:
        rank = 0 if isinstance(failure, Fit) else max(0, failure.rank)
        raise _unusable(failure, job, Path(job.folder) / f"rank{rank}.log")


def may_want_ranks(reports: Sequence[Report], job: RankJob) -> bool:
    """Whether a script that failed on one rank checks how many there are, as a pipeline of stages does."""
    errors = [(end["record"] or {}).get("error", {}) for report in reports for end in report.get("ends", ())]
    return job.source.kind == "script" and any(
        not error.get("contract") and {"AssertionError", "ValueError", "RuntimeError"} & set(error.get("types", ()))
        for error in errors
    )


def _unusable(failure: Outcome, job: RankJob, log: Path) -> AutodsError:
    where = job.source.path
    if isinstance(failure, Failed):
        if failure.action in ("fix_code", "fix_config"):
            return input_error(failure, where, log)
        return EnvironmentBroken(f"{failure.evidence}\n  {failure.advice} (log: {log})")
    return InputError("the workload does not fit into this machine's memory", where=where)


_NOTHING: Mapping[str, str] = {}
_AT_ONCE_S = 3.0
_LARGEST_LOOK = 8  # micro batch: as the walk, which begins with no larger one


class RayRunner:
    """A context manager: Ray and the nodes' zygotes live inside it. `run` answers one trial.

    number: of the runners that share a journal. All but the first (0) want room at once, or raise NoRoom.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        host_bytes: int | None = None,
        environment: Mapping[str, str] = _NOTHING,
        number: int = 0,
    ) -> None:
        self.settings, self.listen, self.host_bytes = settings, listen, host_bytes
        self.loaded = settings.source
        self.surveys: dict[str, tuple[ModelFacts, Mapping[str, str]]] = {}
        self.facts: ModelFacts | None = None
        self.mark = f"{os.getpid()}-{secrets.token_hex(3)}"  # drivers of two machines may have one pid
        self.own = f"-beside{number}" if number else ""  # in the names of logs that another runner may write, too
        self.nodes = Nodes(
            settings,
            listen,
            environment={**os.environ, **environment},
            check=self._check_ready,
            within_s=_AT_ONCE_S if number else None,
        )
        self.report: Report = {}  # what the first node said of the last job, for who asks more
        self.reports: Sequence[Report] = ()  # what all of them said

    def __enter__(self) -> RayRunner:
        address = self.settings.address
        begins = "starting Ray" if address is None else f"joining the Ray cluster at {address}"
        if not self.own:
            self.listen(Note(text=f"{begins} and loading torch and DeepSpeed (once a fit)"))
        self.nodes.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.nodes.__exit__(*exception)

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]:
        """What the workload is, and which DeepSpeed ops cannot be had here. Raises InputError for broken user code."""
        job = self._jobs.survey()
        reports = self._execute(job)
        failure = failure_from(reports, job)
        if failure is not None and self.settings.gpus > 1 and may_want_ranks(reports, job):
            self.listen(Note(text="it does not run on one rank alone, so it is looked at on all of them"))
            job = self._jobs.on_all_ranks(job)
            reports = self._execute(job)
            failure = failure_from(reports, job)
        while isinstance(failure, Failed) and failure.wants_larger_batch and job.micro_batch < _LARGEST_LOOK:
            job = self._jobs.with_more_samples(job)
            reports = self._execute(job)
            failure = failure_from(reports, job)
        check_survey(failure, job)
        result = next(end["record"]["result"] for report in reports for end in report["ends"] if end["rank"] == 0)
        self.facts = ModelFacts(**result["facts"])
        self.settings = with_workloads_config(self.settings, self.facts)
        for said in describe_script(self.settings, self.facts):
            self.listen(Note(text=said))
        return self.facts, result["op_problems"]

    def turn_to(self, settings: Settings) -> tuple[ModelFacts, Mapping[str, str]]:
        """Run trials of these settings from now on: fewer ranks, or other arguments of the workload that is loaded.

        Its survey, which is made once for each of them.
        """
        self.settings = settings
        known = self.surveys.get(settings.source.digest)
        if known is None:
            known = self.surveys[settings.source.digest] = self.survey()
        self.facts, self.settings = known[0], with_workloads_config(settings, known[0])
        return known

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run the trial for real; building first what it needs."""
        began = time.monotonic()
        job = self._jobs.training(trial, id)
        outcome = self._prepare(job) or self._train(job, id)
        return Record(id=id, trial=trial, outcome=outcome, seconds=time.monotonic() - began)

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""
        return self._jobs.final_config(trial)

    @property
    def _jobs(self) -> Jobs:
        return Jobs(settings=self.settings, facts=self.facts, loaded=self.loaded, mark=self.mark, own=self.own)

    def _train(self, job: RankJob, id: int) -> Outcome:
        began = time.monotonic()
        reports = self._execute(job, id)
        facts = self.facts
        assert facts is not None
        return outcome_from(
            reports,
            job,
            wall_s=time.monotonic() - began,
            tokens_per_sample=facts.tokens_per_sample,
            host_bytes=self.nodes.host_bytes or self.host_bytes,
        )

    def _prepare(self, job: RankJob) -> Outcome | None:
        """Build and load the ops that this job needs, before any watchdog's clock starts; why it cannot run, if so.

        A build takes minutes: one that is not cached waits until the model alone is seen to fit.
        """
        ops = [op for op in required_ops(job.ds_config) if op not in self.nodes.built]
        if self.nodes.uncached(ops):
            look = replace(job, only_build=True)
            failure = failure_from(self._execute(look), look)
            if failure is not None:
                return failure
        return self._build(ops)

    def _build(self, ops: list[str]) -> Failed | None:
        for op in ops:
            if self.nodes.uncached([op]):
                usual = f"about {USUAL_BUILD_S[op]} s on two cores, once on this machine"
                self.listen(Note(text=f"building DeepSpeed's {op}: {usual}"))
            job = self._jobs.building(op)
            reports = self._execute(job, everywhere=True)
            failure = failure_from(reports, job)
            if failure is not None:
                said = failure.evidence if not hasattr(failure, "memory") else ""
                return Failed(
                    failure="toolchain", rank=-1, phase="init", evidence=f"{op} could not be built: {said}",
                    action="fix_environment", advice=f"see {job.folder}/rank0.log", op=op,
                )  # fmt: skip
            self.nodes.built.add(op)
        return None

    def _execute(self, job: RankJob, id: int | None = None, *, everywhere: bool = False) -> Sequence[Report]:
        """The report of each node that has a part in the job; heartbeats are passed on while it runs."""
        reports = self.nodes.run(job, lambda phase, step: self._moved(id, phase, step), everywhere=everywhere)
        self.report, self.reports = reports[0], reports
        for text in (text for report in reports for text in report.get("said", ())):
            self.listen(Note(text=text))  # a card that did not come back, ranks that can no longer be forked
        return reports

    def _moved(self, id: int | None, phase: Any, step: int) -> None:
        if id is not None:
            self.listen(TrialMoved(id=id, phase=phase, step=step))

    def _check_ready(self, ready: Report) -> None:
        check_ready(ready, self._jobs.loading(), self.settings.out / "logs" / "zygote.log", self.listen)
