"""Run trials on Ray.

`RayRunner.run` prepares a job for the ranks, has the `WorkerGroup` execute it, and judges the nodes' reports. On
each node an agent owns a zygote, which forks the ranks.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.deepspeed import compose, required_ops, without_monitors
from ..config.settings import Settings, apply_script_config, describe_script
from ..config.strategies import Rung
from ..diagnosis.trial_outcome import make_input_error
from ..errors import AutodsError, EnvironmentBroken, InputError
from ..events import Event, Listener, Note, TrialMoved
from ..trial.job import JobKind, RankJob
from ..trial.ops import BUILDERS, USUAL_BUILD_S
from ..types import Failed, Knobs, ModelFacts, Outcome, OutOfMemory, Record, Trial, WorkloadSource
from .outcome import find_failure, judge_trial, result_of_rank_0
from .protocol import Heartbeat, LoadFailed, NodeReport, NodeResult, Ready, ZygoteDied
from .worker_group import WorkerGroup

Survey = tuple[ModelFacts, Mapping[str, str]]  # the facts, and for each missing DeepSpeed op the reason
_NO_VARIABLES: Mapping[str, str] = {}
_ROOM_WITHIN_S = 3.0
_LARGEST_SURVEY_BATCH = 8  # the walk begins with no larger micro batch


class RayRunner:
    """A context manager: Ray and the nodes' zygotes live inside it. Call `survey` once, then `run` for each trial.

    `environment` has more variables for the ranks.
    `number` is the place among the runners that share a journal. Those after the first (0) raise NoRoom when the
    cluster has no resources for them at once.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        host_bytes: int | None = None,
        environment: Mapping[str, str] = _NO_VARIABLES,
        number: int = 0,
    ) -> None:
        self.settings, self.listen, self.host_bytes, self.number = settings, listen, host_bytes, number
        self.loaded = settings.source  # the workload that the zygotes hold
        self.surveys: dict[str, Survey] = {}  # by the digest of the workload
        self.facts: ModelFacts | None = None
        self.swap_mark = f"{os.getpid()}-{secrets.token_hex(3)}"  # drivers of two machines may have the same pid
        self.workers = WorkerGroup(
            settings,
            listen,
            environment={**os.environ, **environment},
            check_ready=self._check_ready,
            room_within_s=_ROOM_WITHIN_S if number else None,
        )
        self.results: Sequence[NodeResult] = ()  # of the last job

    def __enter__(self) -> RayRunner:
        if not self.number:
            address = self.settings.address
            begins = "starting Ray" if address is None else f"joining the Ray cluster at {address}"
            self._note(f"{begins} and loading torch and DeepSpeed (once a fit)")
        self.workers.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.workers.__exit__(*exception)

    def survey(self) -> Survey:
        """Return the facts of the workload, and the DeepSpeed ops that cannot be built here with the reasons.

        Raises InputError for broken user code, EnvironmentBroken for a broken machine.
        """
        job = self._jobs.survey()
        failure = find_failure(self._execute(job), job)
        if failure is not None and self.settings.gpus > 1 and may_need_all_ranks(self.results, job):
            self._note("the script does not run on one rank alone, so the survey repeats it on all ranks")
            job = self._jobs.on_all_ranks(job)
            failure = find_failure(self._execute(job), job)
        while isinstance(failure, Failed) and failure.wants_larger_batch and job.micro_batch < _LARGEST_SURVEY_BATCH:
            job = self._jobs.with_double_batch(job)
            failure = find_failure(self._execute(job), job)
        check_survey(failure, job)
        result = result_of_rank_0(self.results)
        self.facts = ModelFacts(**result["facts"])
        self.settings = apply_script_config(self.settings, self.facts)
        for text in describe_script(self.settings, self.facts):
            self._note(text)
        return self.facts, result["op_problems"]

    def switch_to(self, settings: Settings) -> Survey:
        """Run trials of these settings from now on: fewer ranks, or other arguments of the loaded workload.

        Returns its survey, which is made once for each workload.
        """
        self.settings = settings
        survey = self.surveys.get(settings.source.digest)
        if survey is None:
            survey = self.surveys[settings.source.digest] = self.survey()
        self.facts, self.settings = survey[0], apply_script_config(settings, survey[0])
        return survey

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run the trial on real ranks, after building the ops that it needs."""
        began = time.monotonic()
        job = self._jobs.training(trial, id)
        outcome = self._build_ops_of(job) or self._train(job, id)
        return Record(id=id, trial=trial, outcome=outcome, seconds=time.monotonic() - began)

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """Return the DeepSpeed config of a trial as the user gets it."""
        return self._jobs.final_config(trial)

    @property
    def _jobs(self) -> JobFactory:
        return JobFactory(
            settings=self.settings, facts=self.facts, loaded=self.loaded, swap_mark=self.swap_mark, number=self.number
        )

    def _train(self, job: RankJob, id: int) -> Outcome:
        assert self.facts is not None
        began = time.monotonic()
        results = self._execute(job, id)
        return judge_trial(
            results,
            job,
            wall_s=time.monotonic() - began,
            tokens_per_sample=self.facts.tokens_per_sample,
            host_bytes=self.workers.host_bytes or self.host_bytes,
        )

    def _build_ops_of(self, job: RankJob) -> Outcome | None:
        """Build and load the ops that this job needs, before any time limit begins; return why that failed, if so.

        A build takes minutes: where one is not cached, the model alone has to fit first.
        """
        ops = [op for op in required_ops(job.ds_config) if op not in self.workers.built_ops]
        if self.workers.needs_build(ops):
            model_only = replace(job, only_build=True)
            failure = find_failure(self._execute(model_only), model_only)
            if failure is not None:
                return failure
        for op in ops:
            if (failure := self._build_op(op)) is not None:
                return failure
        return None

    def _build_op(self, op: str) -> Failed | None:
        if self.workers.needs_build([op]):
            self._note(f"building DeepSpeed's {op}: about {USUAL_BUILD_S[op]} s on two cores, once on this machine")
        job = self._jobs.building(op)
        failure = find_failure(self._execute(job, everywhere=True), job)
        if failure is None:
            self.workers.built_ops.add(op)
            return None
        evidence = failure.evidence if isinstance(failure, Failed) else "memory ran out"
        return Failed(
            failure="toolchain", rank=-1, phase="init", evidence=f"{op} could not be built: {evidence}",
            action="fix_environment", advice=f"see {job.folder}/rank0.log", op=op,
        )  # fmt: skip

    def _execute(self, job: RankJob, id: int | None = None, *, everywhere: bool = False) -> Sequence[NodeResult]:
        """Return the result of each node that has a part in the job. The trial's progress is reported meanwhile."""

        def report(heartbeat: Heartbeat) -> None:
            if id is not None:
                self.listen(TrialMoved(id=id, phase=heartbeat.phase, step=heartbeat.step))

        self.results = self.workers.run(job, report, everywhere=everywhere)
        for result in self.results:
            for text in result.notes if isinstance(result, NodeReport) else ():
                self._note(text)
        return self.results

    def _note(self, text: str) -> None:
        self.listen(Note(text=text))

    def _check_ready(self, ready: Ready | LoadFailed | ZygoteDied) -> None:
        check_ready(ready, self._jobs.survey(), self.settings.out / "logs" / "zygote.log", self.listen)


def check_ready(ready: Ready | LoadFailed | ZygoteDied, job: RankJob, log: Path, listen: Listener) -> None:
    """Check the report of a zygote that has loaded. `job` is any job of the workload.

    Raises InputError when the workload is at fault, EnvironmentBroken when the machine is.
    """
    match ready:
        case LoadFailed():
            failure = find_failure([ready], job)
            assert failure is not None
            raise _explain(failure, job, log)
        case ZygoteDied():
            raise EnvironmentBroken(f"torch and DeepSpeed could not be loaded ({ready.how})\n  see {log}")
        case Ready():
            if ready.spawn_because is not None:  # each trial pays for its imports, so the user has to know
                text = f"ranks start as new processes, some 10 s slower a trial: {ready.spawn_because}"
                listen(Note(text=text))


def check_survey(failure: OutOfMemory | Failed | None, job: RankJob) -> None:
    """Raise InputError or EnvironmentBroken as `check_ready` does, where the survey failed."""
    if failure is not None:
        raise _explain(failure, job, Path(job.folder) / f"rank{max(0, failure.rank)}.log")


def may_need_all_ranks(results: Sequence[NodeResult], job: RankJob) -> bool:
    """Whether a script failed on one rank in a way that a check of the number of ranks could explain."""
    if job.source.kind != "script":
        return False
    errors = [rank.error for result in results if isinstance(result, NodeReport) for rank in result.ranks]
    return any(
        not error.contract and {"AssertionError", "ValueError", "RuntimeError"} & set(error.types) for error in errors
    )


def _explain(failure: OutOfMemory | Failed, job: RankJob, log: Path) -> AutodsError:
    """The error that ends the command."""
    path = job.source.path
    if isinstance(failure, OutOfMemory):
        return InputError("the workload does not fit into this machine's memory", place=path)
    if failure.action in ("fix_code", "fix_config"):
        return make_input_error(failure, path, log)
    return EnvironmentBroken(f"{failure.evidence}\n  {failure.advice} (log: {log})")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFactory:
    """Makes the jobs of a runner.

    `facts` is None before the survey.
    `loaded` is the workload that the zygotes hold.
    `swap_mark` names this driver among others that swap into the same folder.
    `number` names this runner among others that write logs into the same folder.
    """

    settings: Settings
    facts: ModelFacts | None
    loaded: WorkloadSource
    swap_mark: str
    number: int = 0

    def survey(self) -> RankJob:
        """Make the job of one rank that reads the workload's facts and finds ops that cannot be built."""
        settings = self.settings
        rungs = [rung for rung in settings.ladder if not rung.needs.nvme_path or settings.nvme_path]
        ops = tuple(dict.fromkeys(op for rung in rungs for op in required_ops(self._native_config(rung))))
        if settings.source.kind == "script":
            ops = tuple(BUILDERS)  # its config is not known yet
        return self._make(
            "survey",
            self._log_name("survey"),
            ops=ops,
            ds_config=self._native_config(settings.ladder[0]),
            stall_s=settings.profile.limits.init_s,
        )

    def on_all_ranks(self, job: RankJob) -> RankJob:
        """Return the job for as many ranks as trials have."""
        return replace(job, world_size=self.settings.gpus, local_ranks=tuple(range(self.settings.gpus)))

    def with_double_batch(self, job: RankJob) -> RankJob:
        """Return the job with twice the micro batch."""
        size = 2 * job.micro_batch
        return replace(job, micro_batch=size, ds_config={**job.ds_config, "train_micro_batch_size_per_gpu": size})

    def training(self, trial: Trial, id: int) -> RankJob:
        """The job of a trial."""
        assert self.facts is not None, "survey first"
        settings, config = self.settings, without_monitors(self._config(trial, self._swap_folder()))
        return self._make(
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
            swap=str(self._swap_folder()) if "async_io" in required_ops(config) else None,
        )

    def building(self, op: str) -> RankJob:
        """Build and load one of DeepSpeed's ops."""
        limit_s = self.settings.profile.limits.build_s
        return self._make("ops", self._log_name(f"build-{op}"), ops=(op,), init_s=limit_s, wall_s=limit_s)

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""
        return self._config(trial, self.settings.nvme_path)

    def _make(self, kind: JobKind, name: str, **options: Any) -> RankJob:
        limits = self.settings.profile.limits
        folder = self.settings.out / "logs" / name
        common: dict[str, Any] = {"stall_s": limits.stall_s, "init_s": limits.init_s, "wall_s": limits.wall_s}
        return RankJob(
            job=kind,
            source=self.settings.source,
            rebind=self.settings.source != self.loaded,
            device=self.settings.device,
            threads=self.settings.threads,
            folder=str(folder),
            scratch=str(folder / "scratch"),
            **(common | options),
        )

    def _log_name(self, name: str) -> str:
        return f"{name}-beside{self.number}" if self.number else name

    def _swap_folder(self) -> Path | None:
        path = self.settings.nvme_path
        return path / f"autods-{self.swap_mark}" if path else None

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
