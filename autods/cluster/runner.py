"""Run trials on Ray: one actor a node, which owns the zygote that forks the ranks."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..ds_config import compose, ops_of, without_monitors
from ..errors import AutodsError, EnvironmentBroken, InputError
from ..events import Event, Note, TrialMoved
from ..failures import input_error
from ..ladder import Rung
from ..outcomes import Failed, Fit, Outcome
from ..settings import Settings, said_of, with_config_of
from ..trial.ops import BUILDERS, USUAL_BUILD_S
from ..trial.spec import RankJob
from ..values import Knobs, ModelFacts, Record, Trial
from .nodes import Nodes
from .result import failure_from, outcome_from
from .team import Report

_NOTHING: Mapping[str, str] = {}
_AT_ONCE_S = 3.0


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
        self.rungs: Mapping[str, Rung] = {rung.name: rung for rung in settings.ladder}
        self.mark = secrets.token_hex(3)  # drivers of two machines may have one pid
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
        ops = tuple(
            dict.fromkeys(
                op
                for rung in self.settings.ladder
                if not rung.needs_nvme_path or self.settings.nvme_path
                for op in ops_of(self._native_config(rung))
            )
        )
        if self.settings.source.kind == "script":
            ops = tuple(BUILDERS)  # its config is not known yet
        job = self._job(
            "survey",
            f"survey{self.own}",
            ops=ops,
            ds_config=self._native_config(self.settings.ladder[0]),
            stall_s=self.settings.profile.limits.init_s,
        )
        reports = self._execute(job)
        failure = failure_from(reports, job)
        if failure is not None and self.settings.gpus > 1 and _may_want_ranks(reports, job):
            self.listen(Note(text="it does not run on one rank alone, so it is looked at on all of them"))
            job = replace(job, world_size=self.settings.gpus, local_ranks=tuple(range(self.settings.gpus)))
            reports = self._execute(job)
            failure = failure_from(reports, job)
        if failure is not None:
            raise _unusable(failure, job.source.path, Path(job.folder) / f"rank{_rank_of(failure)}.log")
        result = next(end["record"]["result"] for report in reports for end in report["ends"] if end["rank"] == 0)
        self.facts = ModelFacts(**result["facts"])
        self.settings = with_config_of(self.settings, self.facts)
        for said in said_of(self.settings, self.facts):
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
        self.facts, self.settings = known[0], with_config_of(settings, known[0])
        return known

    def run(self, trial: Trial, *, id: int) -> Record:
        """Run the trial for real; building first what it needs."""
        assert self.facts is not None, "survey first"
        began = time.monotonic()
        config = without_monitors(self._config(trial))
        job = self._job(
            "train",
            f"{id:03d}-{trial.rung}",
            ds_config=config,
            world_size=self.settings.gpus,
            replica_ranks=self.facts.replica_ranks,
            local_ranks=tuple(range(self.settings.gpus)),
            micro_batch=trial.knobs.micro_batch,
            accumulation=trial.knobs.accumulation,
            checkpointing=trial.knobs.checkpointing,
            steps=trial.steps,
            exam=trial.exam,
            examined_from_s=trial.examined_from_s,
            limit_bytes=self.settings.device_bytes if trial.limited and self.settings.device_bytes_asked else None,
            seed=self.settings.seed,
            swap=str(self._swap()) if "async_io" in ops_of(config) else None,
        )
        outcome = self._prepare(job) or self._train(job, id)
        return Record(id=id, trial=trial, outcome=outcome, seconds=time.monotonic() - began)

    def final_config(self, trial: Trial) -> dict[str, Any]:
        """The DeepSpeed config of a trial as the user gets it."""
        return self._config(trial, nvme_path=self.settings.nvme_path)

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
        ops = [op for op in ops_of(job.ds_config) if op not in self.nodes.built]
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
            limit = self.settings.profile.limits.build_s
            job = self._job("ops", f"build-{op}{self.own}", ops=(op,), init_s=limit, wall_s=limit)
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
        if "error" in ready:
            job = self._job("survey", "survey")
            failure = failure_from([ready], job)
            assert failure is not None
            raise _unusable(failure, job.source.path, self.settings.out / "logs" / "zygote.log")
        if "died" in ready:
            raise EnvironmentBroken(
                f"torch and DeepSpeed could not be loaded ({ready['died']})\n  see {self.settings.out}/logs/zygote.log"
            )
        if ready.get("unfit"):
            # Never a silent fall-back: each trial now pays for its own imports.
            self.listen(Note(text=f"ranks start as new processes, some 10 s slower a trial: {ready['unfit']}"))

    def _job(self, kind: Any, name: str, **said: Any) -> RankJob:
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
        return path / f"autods-{os.getpid()}-{self.mark}" if path else None

    def _config(self, trial: Trial, nvme_path: Path | None = None) -> dict[str, Any]:
        assert self.facts is not None
        return compose(
            self.rungs[trial.rung],
            trial.knobs,
            base=self.settings.base,
            world_size=self.facts.replicas(self.settings.gpus),
            own_optimizer=self.facts.has_optimizer,
            native_optimizer=trial.native_optimizer,
            nvme_path=nvme_path or self._swap(),
        )

    def _native_config(self, rung: Rung) -> dict[str, Any]:
        return compose(
            rung, Knobs(), base=self.settings.base, world_size=self.settings.gpus, own_optimizer=False, nvme_path=Path()
        )


def _may_want_ranks(reports: Sequence[Report], job: RankJob) -> bool:
    """Whether a script that failed on one rank checks how many there are, as a pipeline of stages does."""
    errors = [(end["record"] or {}).get("error", {}) for report in reports for end in report.get("ends", ())]
    return job.source.kind == "script" and any(
        not error.get("contract") and {"AssertionError", "ValueError", "RuntimeError"} & set(error.get("types", ()))
        for error in errors
    )


def _rank_of(failure: Outcome) -> int:
    return 0 if isinstance(failure, Fit) else max(0, failure.rank)


def _unusable(failure: Outcome, where: str, log: Path) -> AutodsError:
    """The workload cannot even be looked at: the error that ends the fit."""
    if isinstance(failure, Failed):
        if failure.action in ("fix_code", "fix_config"):
            return input_error(failure, where, log)
        return EnvironmentBroken(f"{failure.evidence}\n  {failure.advice} (log: {log})")
    return InputError("the workload does not fit into this machine's memory", where=where)
