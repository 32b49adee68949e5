"""`autods fit`: walk the ladder, grow the batch, race the rungs, tune, certify, report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..config.base_config import find_misspelt_keys
from ..diagnosis.trial_outcome import input_error
from ..errors import EnvironmentBroken, Interrupted
from ..events import Listener, Note
from ..journal import JOURNAL, STUDY, Journal, TrialStore, check_disk_space, workspace
from ..report import serialize
from ..report.results import Report
from ..requests import Settings, with_workloads_config
from ..system.gpus import describe_card_names, describe_shared_cards
from ..system.host import installed_versions, read_hardware
from ..types import Failed, Fit, ModelFacts, Record, WorkloadSource, is_machines_fault
from ..workload.script_source import KIND_DESCRIPTIONS
from .candidates import Candidate, candidates, check_ranks, idle, unforeseeable
from .certify import certified_from
from .conclude import Found, Nothing, nothing_fits, result_of
from .context import Means, Runner, usable_bytes_of
from .forecasts import BLIND, Foresight
from .ladder_walk import closest_of, rivals_of, walked_down
from .optuna_search import tuned_from
from .race import raced_from


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is given and stays. check: passes a record on, and raises when the machine has to be mended first.

    so_far: told of the best config that is known after each step, so that it is not lost when the rest is.
    """

    settings: Settings
    runner: Runner
    memory: TrialStore
    foresight: Foresight
    study: Path
    check: Callable[[Record], Record]
    so_far: Callable[[Record], None] = lambda record: None

    @property
    def usable_bytes(self) -> float:
        """Of the device, with the headroom left."""
        return usable_bytes_of(self.settings)

    def found(self) -> Found | Nothing:
        """Everything that runs trials."""
        facts, op_problems = self.runner.survey()
        check_ranks(facts, self.settings.gpus)
        foresight = self.foresight
        if (reason := unforeseeable(facts)) is not None:
            foresight = BLIND
            if self.settings.forecast:
                self.memory.listen(Note(text=f"{reason}; rungs are tried instead"))
        if (waiting := idle(facts, self.settings.global_batch)) is not None:
            self.memory.listen(Note(text=waiting))
        means = self._means(facts, foresight)
        return _found(candidates(means.settings, facts, op_problems), means, self.so_far)

    def _means(self, facts: ModelFacts, foresight: Foresight) -> Means:
        return Means(
            settings=with_workloads_config(self.settings, facts),
            facts=facts,
            memory=self.memory,
            foresight=foresight,
            study=self.study,
            check=self.check,
            final_config=self.runner.final_config,
        )


def _found(rungs: Sequence[Candidate], means: Means, so_far: Callable[[Record], None]) -> Found | Nothing:
    """The steps, in order."""
    walked = walked_down(rungs, means)
    if walked.winner is None:
        return Nothing(facts=means.facts, walked=walked, closest=closest_of(walked, means))
    so_far(walked.winner)
    raced = raced_from(walked.winner, walked, rungs, means)
    so_far(raced.best)
    tuned = tuned_from(raced, means)
    so_far(tuned.best)
    certified = certified_from(tuned, raced, walked.winner, rivals_of(rungs, walked), means)
    best = tuned.best if certified is None else certified.best
    return Found(
        facts=means.facts, walked=walked, raced=raced, tuned=tuned, certified=certified,
        ds_config=means.final_config(best.trial),
    )  # fmt: skip


Start = Callable[[Settings, Listener], AbstractContextManager[Runner]]
Foresee = Callable[[Settings, Runner, TrialStore, Listener], AbstractContextManager[Foresight]]


def fit(
    settings: Settings,
    *,
    listen: Listener,
    fresh: bool = False,
    start: Start | None = None,
    foresee: Foresee | None = None,
) -> Report:
    """The fastest config that fits, proven by real trials; written into `settings.out` as well.

    A fit that was killed goes on where it stopped; one that is finished is shown again. Raises InputError when the
    workload or the folder is at fault, EnvironmentBroken when the machine is, Interrupted on Ctrl-C.
    """
    with workspace(settings.out, fresh=fresh) as out:
        journal = Journal(out / JOURNAL)
        past = journal.open(fingerprint=settings.fingerprint())
        if (out / "report.json").exists():
            listen(Note(text=f"this fit is finished, here is what it found (--fresh measures again): {out}"))
            return serialize.read(out)
        if past.records:
            listen(Note(text=f"resuming: {len(past.records)} finished trials are not run again"))
        for said in (*notes_of(settings.source), *find_misspelt_keys(settings.base)):
            listen(Note(text=said))
        began = time.monotonic()
        try:
            with (start or _on_ray)(settings, listen) as runner:
                memory = TrialStore(journal, past, lambda trial, id: runner.run(trial, id=id), listen)
                with (foresee or _foreseeing)(settings, runner, memory, listen) as foresight:
                    search = Search(
                        settings=settings, runner=runner, memory=memory, foresight=foresight, study=out / STUDY,
                        check=lambda record: _check_machine(record, settings),
                        so_far=lambda record: serialize.write_so_far(runner.final_config(record.trial), out),
                    )  # fmt: skip
                    found = search.found()
                    if isinstance(found, Nothing):
                        _check_nothing(found, settings)
        except KeyboardInterrupt:
            raise Interrupted("stopped; every rank is gone and the journal is kept") from None
        except OSError:
            check_disk_space(out)
            raise
        earlier_s = sum(record.seconds for record in past.records.values())
        settings = with_workloads_config(settings, found.facts)
        report = _report(settings, memory, foresight, found, time.monotonic() - began + earlier_s)
        serialize.write(report, out)
        return report


def notes_of(source: WorkloadSource) -> tuple[str, ...]:
    """What a person should know of a workload before it is tried."""
    if source.kind != "script":
        return ()
    return (
        f"{Path(source.path).name} is {KIND_DESCRIPTIONS[source.script_kind]} (--kind says otherwise); "
        "it runs as it is, and what it would write is kept out of your folders",
    )


def _report(
    settings: Settings, memory: TrialStore, foresight: Foresight, found: Found | Nothing, seconds: float
) -> Report:
    """What was found as a report, with what the machine is."""
    machine = (asdict(read_hardware()), installed_versions())
    forecasts = foresight.said.values()
    if isinstance(found, Nothing):
        return nothing_fits(settings, found, memory.records, machine, seconds, forecasts)
    return result_of(settings, found, memory.records, machine, seconds, forecasts)


def _check_nothing(found: Nothing, settings: Settings) -> None:
    """That nothing fits can only be said when memory was the reason. What all rungs share is a person's to mend."""
    walked = found.walked
    if walked.stopped is not None:
        _check_machine(walked.stopped, settings)
        assert isinstance(walked.stopped.outcome, Failed)
        raise input_error(walked.stopped.outcome, settings.source.path, _log(walked.stopped, settings))
    failures = [record.outcome for record in walked.records if isinstance(record.outcome, Failed)]
    if failures and len(failures) == len(walked.records):
        rung = walked.records[-1].trial.rung
        raise EnvironmentBroken(f"no rung could be tried: {rung}: {failures[-1].evidence}\n  {failures[-1].advice}")


def _check_machine(record: Record, settings: Settings) -> Record:
    """A full disk or a lost GPU ends the fit: what comes after would fail of the same. Asked again by the next run."""
    outcome = record.outcome
    if isinstance(outcome, Fit) or not is_machines_fault(outcome):
        return record
    seen = f"{record.trial.rung}, rank {outcome.rank}, {outcome.phase}; log: {_log(record, settings)}"
    raise EnvironmentBroken(f"{outcome.evidence}\n  {outcome.advice} ({seen})")


def _log(record: Record, settings: Settings) -> Path:
    assert not isinstance(record.outcome, Fit)
    return settings.out / "logs" / f"{record.id:03d}-{record.trial.rung}" / f"rank{max(0, record.outcome.rank)}.log"


def _foreseeing(
    settings: Settings, runner: Runner, memory: TrialStore, listen: Listener
) -> AbstractContextManager[Foresight]:
    from .foreseeing import foreseeing

    return foreseeing(settings, runner.final_config, memory, listen)


def _on_ray(settings: Settings, listen: Listener) -> AbstractContextManager[Runner]:
    from ..runner.runner import RayRunner

    here = read_hardware()
    if settings.device == "cuda" and settings.address is None:
        names = describe_card_names(os.environ.get("CUDA_VISIBLE_DEVICES"))
        for said in (*describe_shared_cards(here.cards[: settings.gpus]), *names):
            listen(Note(text=said))
    return RayRunner(settings, listen, host_bytes=here.host_bytes)
