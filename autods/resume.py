"""The folder of a fit and what is remembered in it: no finished trial is ever run again."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError
from .events import Listener, TrialFinished, TrialStarted
from .journal import Journal, Past, key_of
from .outcomes import Failed, Fit
from .units import show_bytes
from .values import Record, Trial

JOURNAL = "journal.jsonl"
STUDY = "study.jsonl"
TRACEBACK = "internal-error.txt"  # in logs/, where a fit failed before its journal

# A trial under which the driver died this often is not tried again: it may be what kills it.
_MOST_STARTS = 3

# What a fit or a probe leaves beside its journal; whatever else of these names lies in a folder is somebody's own.
_RESULTS = (
    "report.json", "report.html", "ds_config.json", "ds_config_hf.json", "ds_config_lightning.json", "accelerate.yaml",
    "ds_config_so_far.json", "probe.json", "probe.csv",
)  # fmt: skip

_LOCK = ".lock"
_LEAST_FREE_BYTES = 2**20  # what the logs and results of a trial may need

Execute = Callable[[Trial, int], Record]


@contextlib.contextmanager
def workspace(out: Path, *, fresh: bool) -> Iterator[Path]:
    """The output folder, made and held: two fits in one folder would write over each other.

    fresh: what an earlier fit left there is removed first. Raises InputError when the folder cannot be used.
    """
    _check_own(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / _LOCK, "w")
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", where=str(out), mend="give another folder with --out"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                "another fit is running in this folder", where=str(out), mend="wait for it, or give another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        if fresh:
            _clear(out)
        check_room(out)
        yield out


def check_room(out: Path) -> None:
    """Raises InputError when the disk is full: ranks would die of it in ways that look like something else."""
    free = shutil.disk_usage(out).free
    if free < _LEAST_FREE_BYTES:
        raise InputError(
            f"the disk is full: {show_bytes(free)} are free", where=str(out), mend="free some, or give another --out"
        )


def _check_own(out: Path) -> None:
    """Raises InputError for a folder whose files of our names are not ours: they would be written over."""
    if (out / JOURNAL).exists() or (out / _LOCK).exists():  # a fit that was killed early has no journal yet
        return
    logs = [path for path in out.glob("logs/*") if path.name != TRACEBACK]
    if foreign := [path for name in _RESULTS if (path := out / name).exists()] + logs:
        raise InputError(
            f"holds {foreign[0].relative_to(out)} and no journal of a fit, so nothing is written over",
            where=str(out),
            mend="give another --out, such as a new folder in it",
        )


def _clear(out: Path) -> None:
    for name in _RESULTS:
        (out / name).unlink(missing_ok=True)
    for path in out.glob(f"{STUDY}*"):
        path.unlink()
    shutil.rmtree(out / "logs", ignore_errors=True)
    (out / JOURNAL).unlink(missing_ok=True)  # last: by it the rest is known as ours


@dataclass(slots=True)
class Memory:
    """Answers from the journal what it knows, runs the rest, and writes down what it learns.

    learn: told of each outcome; what it returns, a forecast beside what was measured, is written down too. It may be
    used from several threads.
    """

    journal: Journal
    past: Past
    execute: Execute
    listen: Listener
    records: list[Record] = field(default_factory=list)
    learn: Callable[[Record], Mapping[str, Any] | None] = lambda record: None
    running: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def run(self, trial: Trial, execute: Execute | None = None) -> Record:
        """`values.Run`: the record of a trial, from the past or by running it. execute: in place of the usual one."""
        key = key_of(trial)
        known = self.past.records.get(key)
        record = known or self._run(trial, key, execute or self.execute)
        with self.lock:
            self.records.append(record)
            self.running.discard(record.id)
            if (forecast := self.learn(record)) is not None:
                self.journal.foreseen(record.trial, forecast)
            self.listen(TrialFinished(record=record, replayed=known is not None))
        return record

    def _run(self, trial: Trial, key: str, execute: Execute) -> Record:
        with self.lock:
            known = (*(record.id for record in (*self.past.records.values(), *self.records)), *self.running)
            self.running.add(id := 1 + max(known, default=0))
            if self.past.unfinished.get(key, 0) >= _MOST_STARTS:
                return self._given_up(trial, id)
            check_room(self.journal.path.parent)
            self.journal.started(trial)
            self.listen(TrialStarted(id=id, trial=trial))
        try:
            record = execute(trial, id)
        except KeyboardInterrupt:
            with self.lock:
                self.journal.interrupted(trial)
            raise
        if not isinstance(record.outcome, Fit):
            check_room(self.journal.path.parent)
        with self.lock:
            self.journal.finished(record)
        return record

    def _given_up(self, trial: Trial, id: int) -> Record:
        outcome = Failed(
            failure="infrastructure",
            rank=-1,
            phase="start",
            evidence=f"autods itself died {_MOST_STARTS} times while this trial ran",
            action="nothing",
            advice="look for the kernel's OOM killer: dmesg | grep -i 'killed process'",
        )
        record = Record(id=id, trial=trial, outcome=outcome, seconds=0.0)
        self.journal.finished(record)
        return record
