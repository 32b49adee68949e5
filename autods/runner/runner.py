"""Run trials on Ray.

`RayRunner.run` prepares a job for the ranks, has the `WorkerGroup` execute it, and judges the nodes' reports. On
each node an agent owns a zygote, which forks the ranks.
"""

from __future__ import annotations

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..config.deepspeed import compose, count_replicas, place_monitors, required_ops, without_monitors
from ..config.rungs import Rung, unmet_need
from ..config.settings import Settings, apply_survey, check_precision, describe_script
from ..diagnosis.trial_outcome import LARGEST_SURVEY_BATCH
from ..errors import EnvironmentBroken
from ..events import Event, Note, TrialMoved
from ..rank.job import JobKind, RankJob, RunOrder
from ..rank.ops import USUAL_BUILD_S, check_caches
from ..rank.record import MeasureResult, PreflightResult, RunResult, SurveyResult
from ..system.processes import read_tail
from ..types import (
    PHASES,
    Exam,
    Failed,
    Fit,
    Knobs,
    ModelFacts,
    Outcome,
    OutOfMemory,
    Record,
    Steps,
    Trial,
    may_have_lost_device,
)
from .environment import check_group_timeout, choose_exported
from .health import Preflight, Watch, describe_cards, judge_nodes, judge_rate
from .node_messages import Heartbeat, LoadFailed, NodeReport, NodeResult, Ready, ZygoteDied
from .outcome import (
    find_failure,
    has_built_once,
    judge_trial,
    lacks_host_memory,
    make_error,
    may_need_all_ranks,
    result_of_rank_0,
)
from .rank_fork import may_share
from .time_limits import limit_training, silence_limits, warm_up
from .worker_group import WorkerGroup

_NO_VARIABLES: Mapping[str, str] = {}
_ROOM_WITHIN_S = 3.0
_MEASURE_S = 120.0  # a benchmark takes half a minute; a slow disk longer
_PREFLIGHT_S = 60.0  # ranks on one machine need 1 s, on cards about 10; what takes longer waits for an answer


class Survey(NamedTuple):
    """The facts of a workload, and for each DeepSpeed op that cannot be built here the reason."""

    facts: ModelFacts
    op_problems: Mapping[str, str]


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
        environment: Mapping[str, str] = _NO_VARIABLES,
        number: int = 0,
    ) -> None:
        self.settings, self.listen, self.number = settings, listen, number
        self.loaded = settings.source  # the workload that the zygotes hold
        self.surveys: dict[str, Survey] = {}  # by the digest of the workload
        self.facts: ModelFacts | None = None
        self.swap_mark = f"{os.getpid()}-{secrets.token_hex(3)}"  # drivers of two machines may have the same pid
        variables = os.environ if settings.address is None else choose_exported(os.environ, settings.exported)
        self.workers = WorkerGroup(
            settings,
            listen,
            environment={**variables, **environment},
            check_ready=self.check_ready,
            room_within_s=_ROOM_WITHIN_S if number else None,
        )
        self.results: Sequence[NodeResult] = ()  # of the last trial
        self.watch = Watch(self._warn)
        self.warned: set[str] = set()
        self.checked: object = None  # the nodes of the last preflight
        self.shares_models = True  # the ranks of a node get one built model
        self.sample_s = 0.0  # that a rank's sample took in the slowest trial so far

    def __enter__(self) -> RayRunner:
        check_group_timeout(self.workers.environment)
        if not self.number:
            check_caches()
            address = self.settings.address
            begins = "starting Ray" if address is None else f"joining the Ray cluster at {address}"
            describe_cards(self.settings, self.listen)
            self._note(f"{begins} and loading torch and DeepSpeed (once a fit)")
        self.workers.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.workers.__exit__(*exception)

    def survey(self) -> Survey:
        """Survey the workload on real ranks.

        Raises InputError for broken user code, EnvironmentBroken for a broken machine.
        """
        self.surveys.pop(self.settings.source.digest, None)
        return self.switch_to(self.settings)

    def switch_to(self, settings: Settings) -> Survey:
        """Run trials of these settings from now on: fewer ranks, or other arguments of the loaded workload.

        Returns its survey, which is made once for each workload. A script's own DeepSpeed config joins the settings.
        """
        self.settings = settings
        known = self.surveys.get(settings.source.digest)
        survey = known or self._survey()
        self.facts = survey.facts
        self.settings = apply_survey(settings, survey.facts)
        check_precision(self.settings, survey.op_problems)
        if known is None:
            self.surveys[settings.source.digest] = survey
            for text in describe_script(self.settings, survey.facts):
                self._note(text)
            self.check_machine()
        return survey

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run the trial on real ranks, after building the ops that it needs."""
        began = time.monotonic()
        job = self.trial_job(trial, id)
        outcome = self._build_ops(job) or self._run(job, id)
        if job.shares_model and lacks_host_memory(outcome) and has_built_once(self.results):
            self.shares_models = False
            self._note("host memory ran out beside the model that is built once: from now on each rank builds its own")
            outcome = self._run(self.trial_job(trial, id), id)
        if isinstance(outcome, Fit):
            self.watch.hear_trial(outcome)
            self.sample_s = max(self.sample_s, max(outcome.step_s) / trial.knobs.train_batch(1))
        return Record(id=id, trial=trial, outcome=outcome, seconds=time.monotonic() - began)

    def _run(self, job: RankJob, id: int) -> Outcome:
        """Train as the job of the trial `id` says, and judge the reports."""
        began = time.monotonic()
        return judge_trial(
            self._execute(job, id),
            job,
            wall_s=time.monotonic() - began,
            tokens_per_sample=self._surveyed.tokens_per_sample,
            host_bytes=self.workers.host_memory.total_bytes,
        )

    def take_over(self, settings: Settings, listen: Callable[[Event], None]) -> None:
        """Serve another caller from now on, with these settings for as many ranks of the same workload."""
        self.settings, self.listen = settings, listen
        self.workers.listen = listen

    def adopt(self, facts: ModelFacts) -> None:
        """Take the facts of an earlier survey of this workload, instead of another one."""
        self.facts = facts
        self.settings = apply_survey(self.settings, facts)

    def run_config(self, rung: str, knobs: Knobs) -> dict[str, Any]:
        """Return the DeepSpeed config with which a training run trains: its swap files lie in a folder of its own.

        What monitors write lies below the current folder.
        """
        return place_monitors(self._compose(rung, knobs, self._swap), Path.cwd())

    def run_attempt(self, job: RankJob, on_progress: Callable[[Heartbeat], None]) -> RunResult | OutOfMemory | Failed:
        """Train as the job of a run says; return rank 0's result, or why the ranks failed."""
        self.check_machine()
        if (failure := self._build_ops(job)) is not None:
            return failure

        def hear(heartbeat: Heartbeat) -> None:
            self.watch.hear_heartbeat(heartbeat, of_run=True)
            on_progress(heartbeat)

        results = self.workers.run(job, hear)
        failure = find_failure(results, job)
        if failure is not None and may_have_lost_device(failure):
            self.checked = None
        return failure or result_of_rank_0(results, RunResult)

    def check_machine(self) -> None:
        """Look at devices and links before the first training on these nodes, and warn of what slows it.

        An attempt that the machine may have ended has them looked at again, and so has a node that takes a lost one's
        place. Raises EnvironmentBroken for what makes training senseless. A runner beside others has their nodes.
        """
        if self.number:
            return
        self.workers.replace_lost()
        if self.checked is self.workers.nodes:
            return
        preflight = self.preflight()
        self.checked = self.workers.nodes
        for finding in preflight.findings:
            self._warn(str(finding))

    def preflight(self) -> Preflight:
        """Look at the devices of all nodes, and let the ranks meet for an all-reduce.

        Raises EnvironmentBroken where a device is missing or broken, and where the ranks do not reach each other, after
        a warning for each finding.
        """
        settings, machine = self.settings, self.settings.machine
        preflight = judge_nodes(self.workers.examine(), machine)
        for finding in preflight.findings:
            if finding.is_fatal:
                raise EnvironmentBroken(f"{finding.text}\n  {finding.remedy}")
        if settings.gpus == 1:
            return preflight
        try:
            results = self._run_without_workload("preflight", _PREFLIGHT_S)
        except EnvironmentBroken:  # what slows the devices may be the reason
            for finding in preflight.findings:
                self._warn(str(finding))
            raise
        rate = result_of_rank_0(results, PreflightResult).bytes_per_s
        slow = judge_rate(rate, machine, ranks_per_node=settings.ranks_per_node, nodes=settings.nodes)
        findings = preflight.findings if slow is None else (*preflight.findings, slow)
        return replace(preflight, findings=findings, reduced_per_s=rate)

    def measure(self) -> MeasureResult:
        """Measure what devices, links, host and the NVMe folder of the settings reach; one of the ranks' answers.

        Raises EnvironmentBroken where the ranks do not reach each other.
        """
        swap = self._swap
        results = self._run_without_workload("measure", _MEASURE_S, swap=None if swap is None else str(swap))
        return result_of_rank_0(results, MeasureResult)

    def _run_without_workload(self, kind: JobKind, limit_s: float, **options: Any) -> Sequence[NodeResult]:
        """Run a job of all ranks that trains nothing. Raises EnvironmentBroken where they do not reach each other."""
        settings, init_s = self.settings, self.settings.profile.limits.init_s
        job = self._make_job(
            kind,
            self._log_folder(kind),
            world_size=settings.gpus,
            local_ranks=tuple(range(settings.gpus)),
            silence_s={**dict.fromkeys(PHASES, limit_s), "start": init_s},  # ranks may have to import everything
            wall_s=init_s + limit_s,
            **options,
        )
        results = self.workers.run(job)
        if (failure := find_failure(results, job)) is not None:
            log = f"{job.folder}/rank{max(0, failure.rank)}.log"
            raise EnvironmentBroken(
                f"the ranks do not reach each other: {failure.evidence}\n  {failure.advice} (log: {log})"
            )
        return results

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """Return the DeepSpeed config of a trial as the user gets it."""
        return self._compose(trial.rung, trial.knobs, self.settings.nvme_path)

    def check_ready(self, ready: Ready | LoadFailed | ZygoteDied) -> None:
        """Check the report of a zygote that has loaded.

        Raises InputError when the workload is at fault, EnvironmentBroken when the machine is.
        """
        log = self.settings.out / "logs" / "zygote.log"
        match ready:
            case LoadFailed():
                job = self.survey_job()
                failure = find_failure([ready], job)
                assert failure is not None
                raise make_error(failure, job, log)
            case ZygoteDied():
                lines = read_tail(log).strip().splitlines() if ready.how == "exit 1" else []  # it says why
                reason = lines[-1] if lines else ready.how
                hint = "memory may have run out: see dmesg, and" if "SIGKILL" in reason else "see"
                raise EnvironmentBroken(f"torch and DeepSpeed could not be loaded ({reason})\n  {hint} {log}")
            case Ready():
                if ready.spawn_because is not None:  # each trial pays for its imports, so the user has to know
                    self._note(f"ranks start as new processes, some 10 s slower a trial: {ready.spawn_because}")

    def survey_job(self, *, ranks: int = 1, micro_batch: int = 1) -> RankJob:
        """Make the job that reads the workload's facts and finds ops that cannot be built."""
        settings = self.settings
        rungs = [rung for rung in settings.ladder if unmet_need(rung, settings.site, None) is None]
        ops = tuple(dict.fromkeys(op for rung in rungs for op in required_ops(self._native_config(rung))))
        if settings.source.form.brings_config:
            ops = tuple(dict.fromkeys((*USUAL_BUILD_S, *ops)))  # its config is not known yet
        return self._make_job(
            "survey",
            self._log_folder(f"survey{self._log_suffix}"),
            ops=ops,
            world_size=ranks,
            local_ranks=tuple(range(ranks)),
            micro_batch=micro_batch,
            ds_config={**self._native_config(settings.ladder[0]), "train_micro_batch_size_per_gpu": micro_batch},
            silence_s=dict.fromkeys(PHASES, settings.profile.limits.init_s),
        )

    def trial_job(self, trial: Trial, id: int) -> RankJob:
        """Make the job of a trial."""
        config = without_monitors(self._compose(trial.rung, trial.knobs, self._swap))
        return self._make_training_job(
            "train",
            self._log_folder(f"{id:03d}-{trial.rung}"),
            config,
            trial.knobs,
            steps=warm_up(trial, config),
            exam=trial.exam,
            limited=trial.limited,
        )

    def run_job(self, order: RunOrder, rung: str, knobs: Knobs) -> RankJob:
        """Make the job of an attempt of a run. It has no limit of time but that of silence."""
        config = self.run_config(rung, knobs)
        job = self._make_training_job("run", order.attempt_folder / "ranks", config, knobs, steps=Steps(), order=order)
        silence_s = {**job.silence_s, "load": max(job.silence_s["load"], job.silence_s["init"])}
        return replace(job, silence_s=silence_s, wall_s=math.inf)

    def _make_training_job(
        self,
        kind: JobKind,
        folder: Path,
        config: Mapping[str, Any],
        knobs: Knobs,
        *,
        steps: Steps,
        exam: Exam | None = None,
        limited: bool = True,
        order: RunOrder | None = None,
    ) -> RankJob:
        settings, facts, swap = self.settings, self._surveyed, self._swap
        has_limit = limited and (settings.is_limited or knobs.keeps_headroom)
        limit_bytes = settings.find_limit(knobs) if has_limit else None
        limits = limit_training(
            settings.profile.limits, knobs, facts, config,
            nodes=settings.nodes, sample_s=self.sample_s, steps=steps, exam=exam,
        )  # fmt: skip
        return self._make_job(
            kind,
            folder,
            ds_config=config,
            world_size=settings.gpus,
            replica_ranks=settings.gpus // count_replicas(settings.base, settings.gpus, facts),
            local_ranks=tuple(range(settings.gpus)),
            micro_batch=knobs.micro_batch,
            accumulation=knobs.accumulation,
            checkpointing=knobs.checkpointing,
            expandable=knobs.expandable,
            steps=steps,
            exam=exam,
            order=order,
            shares_model=kind == "train" and self.shares_models and may_share(settings.source, exam, config),
            limit_bytes=limit_bytes,
            seed=settings.seed,
            swap=str(swap) if "async_io" in required_ops(config) else None,
            **limits,
        )

    @property
    def _swap(self) -> Path | None:
        """The folder of this runner's swap files."""
        path = self.settings.nvme_path
        return path / f"autods-{self.swap_mark}" if path else None

    def building_job(self, op: str) -> RankJob:
        """Make the job that builds and loads one of DeepSpeed's ops."""
        limit_s = self.settings.profile.limits.build_s
        silence_s = dict.fromkeys(PHASES, limit_s)
        folder = self._log_folder(f"build-{op}{self._log_suffix}")
        return self._make_job("ops", folder, ops=(op,), silence_s=silence_s, wall_s=limit_s)

    def _survey(self) -> Survey:
        job = self.survey_job()
        results = self._execute(job)
        if self.settings.gpus > 1 and may_need_all_ranks(results, job):
            self._note("the script does not run on one rank alone, so the survey repeats it on all ranks")
            self.check_machine()
            job = self.survey_job(ranks=self.settings.gpus)
            results = self._execute(job)
        while (failure := find_failure(results, job)) is not None:
            wants_larger_batch = isinstance(failure, Failed) and failure.wants_larger_batch
            if not wants_larger_batch or job.micro_batch >= LARGEST_SURVEY_BATCH:
                raise make_error(failure, job)
            job = self.survey_job(ranks=job.world_size, micro_batch=2 * job.micro_batch)
            results = self._execute(job)
        result = result_of_rank_0(results, SurveyResult)
        return Survey(result.facts, result.op_problems)

    def _build_ops(self, job: RankJob) -> OutOfMemory | Failed | None:
        """Build and load the ops that this job needs, before any time limit begins; return why that failed, if so."""
        for op in [op for op in required_ops(job.ds_config) if op not in self.workers.built_ops]:
            if self.workers.needs_build([op]):
                usual = f"about {USUAL_BUILD_S[op]} s on two cores" if op in USUAL_BUILD_S else "some minutes"
                self._note(f"building DeepSpeed's {op}: {usual}, once on this machine")
            build = self.building_job(op)
            failure = find_failure(self._execute(build, everywhere=True), build)
            if failure is not None:
                evidence = failure.evidence if isinstance(failure, Failed) else "memory ran out"
                return Failed(
                    failure="toolchain", rank=-1, phase="init", evidence=f"{op} could not be built: {evidence}",
                    action="fix_environment", advice=f"see {build.folder}/rank0.log", op=op,
                )  # fmt: skip
            self.workers.built_ops.add(op)
        return None

    def _execute(self, job: RankJob, id: int | None = None, *, everywhere: bool = False) -> Sequence[NodeResult]:
        """Run the job; return what the nodes report. The progress of the trial `id` is reported meanwhile."""

        def report(heartbeat: Heartbeat) -> None:
            self.watch.hear_heartbeat(heartbeat, of_run=False)
            if id is not None:
                self.listen(TrialMoved(id=id, phase=heartbeat.phase, step=heartbeat.step))

        self.results = self.workers.run(job, report, everywhere=everywhere)
        for result in self.results:
            for text in result.notes if isinstance(result, NodeReport) else ():
                self._note(text)
        return self.results

    def _note(self, text: str) -> None:
        self.listen(Note(text=text))

    def _warn(self, text: str) -> None:
        """Warn once."""
        if text not in self.warned:
            self.warned.add(text)
            self.listen(Note(text=text, warns=True))

    @property
    def _log_suffix(self) -> str:
        """Distinguishes the logs of runners that share a folder."""
        return f"-beside{self.number}" if self.number else ""

    def _log_folder(self, name: str) -> Path:
        return self.settings.out / "logs" / name

    def _make_job(self, kind: JobKind, folder: Path, **options: Any) -> RankJob:
        settings, limits = self.settings, self.settings.profile.limits
        common: dict[str, Any] = {"silence_s": silence_limits(limits), "wall_s": limits.wall_s}
        return RankJob(
            job=kind,
            source=settings.source,
            rebind=settings.source != self.loaded,
            device=settings.device,
            threads=settings.threads,
            folder=str(folder),
            scratch=str(folder / "scratch"),
            **(common | options),
        )

    def _compose(self, rung: str, knobs: Knobs, nvme_path: Path | None) -> dict[str, Any]:
        site = replace(self.settings.site, nvme_path=nvme_path)
        return compose(self.settings.rung(rung), knobs, site, self._surveyed)

    @property
    def _surveyed(self) -> ModelFacts:
        assert self.facts is not None, "survey first"
        return self.facts

    def _native_config(self, rung: Rung) -> dict[str, Any]:
        return compose(rung, Knobs(), self.settings.site, None)
