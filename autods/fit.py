"""`autods fit`: the folder, the journal and the machines around a search, and the report that comes of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

from . import report as reports
from .base_config import misspelt
from .cards import said_of, said_of_names
from .conclude import nothing_fits, result_of
from .errors import EnvironmentBroken, Interrupted
from .events import Listener, Note
from .failures import input_error
from .hardware import look, versions
from .journal import Journal
from .outcomes import Failed, Fit, is_machines_fault
from .report import Report
from .resume import JOURNAL, STUDY, Memory, check_room, workspace
from .search.foresight import Foresight
from .searching import Found, Nothing, Runner, Search
from .settings import Settings, with_config_of
from .values import Record, WorkloadSource
from .workload.script import SAID

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
        for said in (*notes_of(settings.source), *misspelt(settings.base)):
            listen(Note(text=said))
        began = time.monotonic()
        try:
            with (start or _on_ray)(settings, listen) as runner:
                memory = Memory(journal, past, lambda trial, id: runner.run(trial, id=id), listen)
                with (foresee or _foreseeing)(settings, runner, memory, listen) as foresight:
                    search = Search(
                        settings=settings, runner=runner, memory=memory, foresight=foresight, study=out / STUDY,
                        check=lambda record: _check_machine(record, settings),
                        so_far=lambda record: reports.write_so_far(runner.final_config(record.trial), out),
                    )  # fmt: skip
                    found = search.found()
                    if isinstance(found, Nothing):
                        _check_nothing(found, settings)
        except KeyboardInterrupt:
            raise Interrupted("stopped; every rank is gone and the journal is kept") from None
        except OSError:
            check_room(out)
            raise
        earlier_s = sum(record.seconds for record in past.records.values())
        settings = with_config_of(settings, found.facts)
        report = _report(settings, memory, foresight, found, time.monotonic() - began + earlier_s)
        reports.write(report, out)
        return report


def notes_of(source: WorkloadSource) -> tuple[str, ...]:
    """What a person should know of a workload before it is tried."""
    if source.kind != "script":
        return ()
    return (
        f"{Path(source.path).name} is {SAID[source.script_kind]} (--kind says otherwise); "
        "it runs as it is, and what it would write is kept out of your folders",
    )


def _report(settings: Settings, memory: Memory, foresight: Foresight, found: Found | Nothing, seconds: float) -> Report:
    """What was found as a report, with what the machine is."""
    machine = (asdict(look()), versions())
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
    settings: Settings, runner: Runner, memory: Memory, listen: Listener
) -> AbstractContextManager[Foresight]:
    from .foreseeing import foreseeing

    return foreseeing(settings, runner.final_config, memory, listen, facts=lambda: getattr(runner, "facts", None))


def _on_ray(settings: Settings, listen: Listener) -> AbstractContextManager[Runner]:
    from .cluster.runner import RayRunner

    here = look()
    if settings.device == "cuda" and settings.address is None:
        for said in (*said_of(here.cards[: settings.gpus]), *said_of_names(os.environ.get("CUDA_VISIBLE_DEVICES"))):
            listen(Note(text=said))
    return RayRunner(settings, listen, host_bytes=here.host_bytes)
