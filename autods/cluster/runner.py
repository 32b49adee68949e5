"""Run trials on Ray: one actor a node, which owns the zygote that forks the ranks."""

from __future__ import annotations

import contextlib
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
from ..trial.ops import BUILDERS, USUAL_BUILD_S, is_cached
from ..trial.spec import RankJob
from ..values import Knobs, ModelFacts, Record, Trial
from .launch import Offer, launch
from .mustering import Mustered, muster
from .ray_session import is_connected, session
from .result import failure_from, outcome_from
from .team import Team, parts_of, shared_folders

_NOTHING: Mapping[str, str] = {}


class RayRunner:
    """A context manager: Ray and the node's zygote live inside it. `run` answers one trial."""

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        host_bytes: int | None = None,
        environment: Mapping[str, str] = _NOTHING,
    ) -> None:
        self.settings, self.listen, self.host_bytes = settings, listen, host_bytes
        self.loaded = settings.source
        self.environment = {**os.environ, **environment}
        self.surveys: dict[str, tuple[ModelFacts, Mapping[str, str]]] = {}
        self.facts: ModelFacts | None = None
        self.rungs: Mapping[str, Rung] = {rung.name: rung for rung in settings.ladder}
        self.built: set[str] = set()
        self.mark = secrets.token_hex(3)  # drivers of two machines may have one pid
        self.exits = contextlib.ExitStack()
        self.ray: Any = None
        self.asked = settings  # what the nodes were chosen for
        self.mustered: Mustered | None = None
        self.report: Mapping[str, Any] = {}  # what the first node said of the last job, for who asks more
        self.reports: Sequence[Mapping[str, Any]] = ()  # what all of them said

    def __enter__(self) -> RayRunner:
        with contextlib.ExitStack() as stack:
            address = self.settings.address
            begins = "starting Ray" if address is None else f"joining the Ray cluster at {address}"
            self.listen(Note(text=f"{begins} and loading torch and DeepSpeed (once a fit)"))
            log = str(self.settings.out / "logs" / "zygote.log")
            offered = self._offered(stack, log)
            self.ray = stack.enter_context(session(cpus=max(2, os.cpu_count() or 2), address=address))
            stack.callback(self._stop)
            self._muster(offered)
            self.exits = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.exits.close()

    @property
    def actor(self) -> Any:
        """Of the first node."""
        assert self.mustered is not None
        return self.mustered.team.members[0].actor

    def _muster(self, offered: str | None = None) -> None:
        """Nodes for the ranks, each with a zygote that has loaded everything."""
        settings = self.asked
        mustered = muster(self.ray, settings, self.listen, environment=self.environment, offered=offered)
        self.mustered = mustered
        if settings.address is not None:
            self.host_bytes = mustered.host_bytes
        for ready in mustered.ready():
            self._check_ready(ready)

    def _offered(self, stack: contextlib.ExitStack, log: str) -> str | None:
        """Have a zygote load while Ray starts, for the actor to take; its name.

        None where the actor starts it itself: it may be on another machine, or be the one that knows its cards.
        """
        if self.settings.device != "cpu" or self.settings.address is not None or is_connected():
            return None
        zygote = launch(self.settings.source, self.settings.device, os.getpid(), log, self.environment)
        return stack.enter_context(Offer(*zygote)).name

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
            "survey",
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
            host_bytes=self.host_bytes,
        )

    def _prepare(self, job: RankJob) -> Outcome | None:
        """Build and load the ops that this job needs, before any watchdog's clock starts; why it cannot run, if so.

        A build takes minutes: one that is not cached waits until the model alone is seen to fit.
        """
        ops = [op for op in ops_of(job.ds_config) if op not in self.built]
        if self._uncached(ops):
            look = replace(job, only_build=True)
            failure = failure_from(self._execute(look), look)
            if failure is not None:
                return failure
        return self._build(ops)

    def _build(self, ops: list[str]) -> Failed | None:
        for op in ops:
            if self._uncached([op]):
                usual = f"about {USUAL_BUILD_S[op]} s on two cores, once on this machine"
                self.listen(Note(text=f"building DeepSpeed's {op}: {usual}"))
            limit = self.settings.profile.limits.build_s
            job = self._job("ops", f"build-{op}", ops=(op,), init_s=limit, wall_s=limit)
            reports = self._execute(job, everywhere=True)
            failure = failure_from(reports, job)
            if failure is not None:
                said = failure.evidence if not hasattr(failure, "memory") else ""
                return Failed(
                    failure="toolchain", rank=-1, phase="init", evidence=f"{op} could not be built: {said}",
                    action="fix_environment", advice=f"see {job.folder}/rank0.log", op=op,
                )  # fmt: skip
            self.built.add(op)
        return None

    def _execute(self, job: RankJob, id: int | None = None, *, everywhere: bool = False) -> list[Mapping[str, Any]]:
        """The report of each node that has a part in the job; heartbeats are passed on while it runs.

        everywhere: every node does all of it by itself; else its ranks are cut along the nodes.
        """
        team = self._whole_team()
        members, each = team.members, self.asked.ranks_per_node
        if everywhere:
            parts = [(member, _of_node(job, number)) for number, member in enumerate(members)]
        elif job.world_size <= each:
            parts = [(members[0], job)]  # one node is enough
        else:
            first = members[0].node.address
            bound = team.bind(first)
            if (port := bound.get("bound")) is None:
                self.report = {"lost": bound["why"], "address": first} if "why" in bound else bound
                return [self.report]
            parts = parts_of(job, members, each, port)
        with shared_folders(parts):
            reports = team.execute(parts, lambda phase, step: self._moved(id, phase, step))
        self.report, self.reports = reports[0], reports
        for text in (text for report in reports for text in report.get("said", ())):
            self.listen(Note(text=text))  # a card that did not come back, ranks that can no longer be forked
        if team.lost is not None and self.asked.address is None:
            raise EnvironmentBroken(f"the Ray actor of this node died: {team.lost.lost}")
        return reports

    def _whole_team(self) -> Team:
        """The nodes, or others in place of those that were lost. Raises EnvironmentBroken where too few are left."""
        assert self.mustered is not None
        lost = self.mustered.team.lost
        if lost is not None:
            self.listen(
                Note(text=f"node {lost.node.address} was lost ({lost.lost}); the ranks are placed on what is left")
            )
            self._stop()
            self.built.clear()  # a node that is new may not have them
            self._muster()
        return self.mustered.team

    def _uncached(self, ops: list[str]) -> bool:
        """Whether one of them has to be built on any node."""
        if self.asked.address is None:
            return not all(is_cached(op) for op in ops)
        actors = [member.actor for member in self._whole_team().members]
        return any(self.ray.get([actor.uncached.remote(ops) for actor in actors]))

    def _moved(self, id: int | None, phase: Any, step: int) -> None:
        if id is not None:
            self.listen(TrialMoved(id=id, phase=phase, step=step))

    def _check_ready(self, ready: Mapping[str, Any]) -> None:
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

    def _stop(self) -> None:
        """All ranks gone, then the zygotes, then the actors; Ray itself is the session's."""
        if self.mustered is not None:
            self.mustered.dismiss()

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


def _may_want_ranks(reports: Sequence[Mapping[str, Any]], job: RankJob) -> bool:
    """Whether a script that failed on one rank checks how many there are, as a pipeline of stages does."""
    errors = [(end["record"] or {}).get("error", {}) for report in reports for end in report.get("ends", ())]
    return job.source.kind == "script" and any(
        not error.get("contract") and {"AssertionError", "ValueError", "RuntimeError"} & set(error.get("types", ()))
        for error in errors
    )


def _of_node(job: RankJob, number: int) -> RankJob:
    """The same job for a node that does all of it, in folders of its own."""
    return (
        job if number == 0 else replace(job, folder=f"{job.folder}-node{number}", scratch=f"{job.scratch}-node{number}")
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
