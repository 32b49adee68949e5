"""Trials without Ray: a zygote of our own that forks the ranks of this machine, as a fit's node does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autods.rank.job import RankJob
from autods.rank.record import RankResult, SurveyResult
from autods.runner.agent import ZygoteProcess, start_zygote
from autods.runner.node_messages import LoadFailed, NodeReport, NodeResult, Ready, ZygoteDied
from autods.runner.outcome import find_failure, judge_trial, result_of_rank_0
from autods.types import PHASES, ModelFacts, Outcome, WorkloadSource


class NoRanks(Exception):
    """No trial can be run here; the message says why."""


class Ranks:
    """A context manager. `survey` once, then `run` trials one at a time; said: what a person should know of them."""

    def __init__(
        self, source: WorkloadSource, device: str, ranks: int, out: Path, said: Callable[[str], None] = print
    ) -> None:
        self.source, self.device, self.ranks, self.out, self.said = source, device, ranks, out, said
        self.zygote: ZygoteProcess | None = None
        self.count = 0
        self.facts: ModelFacts | None = None

    def __enter__(self) -> Ranks:
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def survey(self) -> ModelFacts:
        """What the model is."""
        job = self._job(job="survey", ranks=1)
        report = self._execute(job)
        failure = find_failure([report], job)
        if failure is not None:
            raise NoRanks(f"{self.source.name}: {getattr(failure, 'evidence', failure)}")
        self.facts = result_of_rank_0([report], SurveyResult).facts
        return self.facts

    def build(self, op: str, limit_s: float) -> bool:
        """Whether this op of DeepSpeed can be had here."""
        job = self._job(job="ops", ranks=1, ops=(op,), silence_s=dict.fromkeys(PHASES, limit_s), wall_s=limit_s)
        return find_failure([self._execute(job)], job) is None

    def run(self, **said: Any) -> tuple[Outcome, Mapping[str, int | None], float]:
        """One trial: its outcome, the largest of each peak over the ranks, and its wall seconds."""
        assert self.facts is not None, "survey first"
        job, began = self._job(job="train", ranks=self.ranks, **said), time.monotonic()
        report = self._execute(job)
        wall_s = time.monotonic() - began
        outcome = judge_trial(
            [report], job, wall_s=wall_s, tokens_per_sample=self.facts.tokens_per_sample, host_bytes=None
        )
        for sentence in report.notes if isinstance(report, NodeReport) else ():
            self.said(sentence)
        return outcome, peaks_of(report), wall_s

    def _job(self, *, job: Any, ranks: int, **said: Any) -> RankJob:
        self.count += 1
        folder = self.out / f"{self.count:03d}-{job}"
        made = RankJob(
            job=job, source=self.source, device=self.device, folder=str(folder), scratch=str(folder / "scratch"),
            world_size=ranks, local_ranks=tuple(range(ranks)),
        )  # fmt: skip
        return replace(made, **said)

    def _execute(self, job: RankJob) -> NodeResult:
        """Hand the job to the zygote; a dead one is reported as a fit reports it, and replaced."""
        assert self.zygote is not None
        self.zygote.send(job.to_json().encode())
        while (message := self.zygote.receive(600)) is not None:
            if isinstance(message, NodeReport):
                return message
        code = self._stop()
        self._start()
        return ZygoteDied(how=f"exit {code}")

    def _start(self) -> None:
        log = str(self.out / "zygote.log")
        self.zygote = start_zygote(self.source, self.device, os.getpid(), log, dict(os.environ))
        match self.zygote.receive(600):
            case Ready() as ready:
                if ready.spawn_because:
                    self.said(f"ranks start as new processes, some 10 s slower a trial: {ready.spawn_because}")
            case LoadFailed(error=error):
                raise NoRanks(f"torch, DeepSpeed or the workload could not be loaded: {error.message}; see {log}")
            case _:
                raise NoRanks(f"torch, DeepSpeed or the workload could not be loaded: it died; see {log}")

    def _stop(self) -> int | None:
        """The exit code of the zygote; None where there was none."""
        zygote, self.zygote = self.zygote, None
        return zygote.close() if zygote is not None else None


def peaks_of(report: NodeResult) -> dict[str, int | None]:
    """The largest of each measure over the ranks that left a result."""
    largest: dict[str, int | None] = {}
    for rank in report.ranks if isinstance(report, NodeReport) else ():
        for name, value in (rank.result.peaks if isinstance(rank.result, RankResult) else {}).items():
            if value is not None:
                largest[name] = max(value, largest.get(name) or 0)
    return largest
