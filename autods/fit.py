"""`autods fit`: walk the ladder, grow the batch, tune the buckets, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from . import report as reports
from .conclude import nothing_fits, result_of
from .ds_config import get
from .errors import EnvironmentBroken, Interrupted
from .failures import input_error
from .hardware import look, versions
from .journal import Journal
from .report import Report
from .resume import JOURNAL, STUDY, Memory, check_room, workspace
from .search.candidates import candidates
from .search.foresight import Foresight
from .search.grow import Grown, grow
from .search.shortfall import shortfall
from .search.tune import Tuned, tune
from .search.walk import Walked, walk
from .settings import Settings
from .values import Failed, Fit, Listener, ModelFacts, Note, Record, Trial, is_machines_fault


class Runner(Protocol):
    """What a fit needs of a runner; `cluster.runner.RayRunner` is the real one."""

    def survey(self) -> tuple[ModelFacts, Mapping[str, str]]: ...

    def run(self, trial: Trial, *, id: int) -> Record: ...

    def final_config(self, trial: Trial) -> dict[str, Any]: ...


Start = Callable[[Settings, Listener], AbstractContextManager[Runner]]
Foresee = Callable[[Settings, Runner, Memory, Listener], AbstractContextManager[Foresight]]


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
            return reports.read(out)
        if past.records:
            listen(Note(text=f"resuming: {len(past.records)} finished trials are not run again"))
        began = time.monotonic()
        try:
            with (start or _on_ray)(settings, listen) as runner:
                memory = Memory(journal, past, lambda trial, id: runner.run(trial, id=id), listen)
                with (foresee or _foreseeing)(settings, runner, memory, listen) as foresight:
                    found = _search(settings, runner, memory, listen, out, foresight)
        except KeyboardInterrupt:
            raise Interrupted("stopped; every rank is gone and the journal is kept") from None
        except OSError:
            check_room(out)
            raise
        earlier_s = sum(record.seconds for record in past.records.values())
        report = found(time.monotonic() - began + earlier_s)
        reports.write(report, out)
        return report


def _search(
    settings: Settings, runner: Runner, memory: Memory, listen: Listener, out: Path, foresight: Foresight
) -> Callable[[float], Report]:
    """Everything that runs trials; what comes back makes the report once the seconds are known."""
    facts, op_problems = runner.survey()
    profile = settings.profile
    walked = walk(candidates(settings, facts, op_problems), memory.run, profile.walk, listen, foresight)
    _check(walked, settings)
    if walked.winner is None:
        closest = shortfall(
            walked.records, memory.run, profile.walk, settings.device_bytes, can_unlimit=settings.device_bytes_asked
        )
        _check_failures(walked)
        return lambda seconds: nothing_fits(
            settings, facts, walked, closest, memory.records, _machine(), seconds, foresight.said.values()
        )
    grown = _grow(walked.winner, memory, settings, foresight)
    tuned = _tune(grown, memory, settings, out / STUDY, runner.final_config(grown.best.trial), foresight)
    config = runner.final_config(tuned.best.trial)
    return lambda seconds: result_of(
        settings, facts, walked, grown, tuned, config, memory.records, _machine(), seconds, foresight.said.values()
    )


def _grow(winner: Record, memory: Memory, settings: Settings, foresight: Foresight) -> Grown:
    return grow(
        winner,
        lambda trial: _check_machine(memory.run(trial), settings),
        limits=settings.profile.grow,
        steps=settings.profile.timed,
        limit_bytes=settings.device_bytes,
        headroom=settings.profile.headroom,
        world_size=settings.gpus,
        global_batch=settings.global_batch,
        foresight=foresight,
    )


def _tune(
    grown: Grown, memory: Memory, settings: Settings, study: Path, config: Mapping[str, Any], foresight: Foresight
) -> Tuned:
    rung = next(rung for rung in settings.ladder if rung.name == grown.best.trial.rung)
    return tune(
        grown.best,
        lambda trial: _check_machine(memory.run(trial), settings),
        rung=rung,
        limits=settings.profile.tune,
        steps=settings.profile.timed,
        limit_bytes=settings.device_bytes,
        headroom=settings.profile.headroom,
        seed=settings.seed,
        study_path=study,
        current={key: value for key in rung.tune if (value := get(config, key)) is not None},
        foresight=foresight,
    )


def _check(walked: Walked, settings: Settings) -> None:
    """A failure that every rung would share ends the fit: it is the user's to mend."""
    if walked.stopped is None:
        return
    _check_machine(walked.stopped, settings)
    outcome = walked.stopped.outcome
    assert isinstance(outcome, Failed)
    raise input_error(outcome, settings.source.path, _log(walked.stopped, settings))


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


def _check_failures(walked: Walked) -> None:
    """That nothing fits can only be said when memory was the reason."""
    failures = [record for record in walked.records if isinstance(record.outcome, Failed)]
    if failures and len(failures) == len(walked.records):
        last = failures[-1]
        assert isinstance(last.outcome, Failed)
        raise EnvironmentBroken(
            f"no rung could be tried: {last.trial.rung}: {last.outcome.evidence}\n  {last.outcome.advice}"
        )


def _machine() -> tuple[dict[str, Any], dict[str, str]]:
    return asdict(look()), versions()


def _foreseeing(
    settings: Settings, runner: Runner, memory: Memory, listen: Listener
) -> AbstractContextManager[Foresight]:
    from .foreseeing import foreseeing

    return foreseeing(settings, runner.final_config, memory, listen)


def _on_ray(settings: Settings, listen: Listener) -> AbstractContextManager[Runner]:
    from .cluster.runner import RayRunner

    return RayRunner(settings, listen, host_bytes=look().host_bytes)
