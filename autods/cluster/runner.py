"""Run trials on Ray: one actor a node, which owns the zygote that forks the ranks."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..ds_config import ops_of
from ..events import Event, Note, TrialMoved
from ..outcomes import Failed, Outcome
from ..settings import Settings, said_of, with_config_of
from ..trial.ops import USUAL_BUILD_S
from ..trial.spec import RankJob
from ..values import ModelFacts, Record, Trial
from .jobs import Jobs
from .nodes import Nodes
from .result import failure_from, outcome_from
from .team import Report
from .unusable import check_ready, check_survey, may_want_ranks

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
