"""The append-only record of a fit or a probe, its folder and lock, and the store that answers from it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from .diagnosis.trial_outcome import blame_code_for_hang
from .errors import EnvironmentBroken, InputError, Interrupted, make_write_error
from .events import Listener, Note, TrialFinished, TrialStarted
from .files import LARGEST_RECORD, check_is_file, open_without_waiting, read_file
from .schema import read_as
from .system.limits import check_space
from .types import Failed, Fit, Outcome, Record, Trial, is_machines_fault

AnyEvent = TypeVar("AnyEvent")
VERSION = 3
_ROW_START = b'{"kind": "'
_HEADER_START = _ROW_START + b'header"'
_OF_TRIALS = {"started", "finished", "forecast"}  # kinds of rows that are lost with a journal


def trial_key(trial: Trial) -> str:
    """Return the key by which the journal finds the record of a trial; equal trials have equal keys."""
    row = asdict(trial)
    for name in ("expandable", "keeps_headroom"):  # older journals have no such knob
        if not row["knobs"][name]:
            del row["knobs"][name]
    return json.dumps(row, sort_keys=True)


@dataclass(frozen=True, slots=True)
class History:
    """The content of a journal.

    `records` holds the finished trials by key. `unfinished` counts by key how often a trial was started without an end.
    `forecasts` has the forecasts of a probe's trials by key. `surveys` has the facts of a workload by its digest.
    `device_bytes` is the memory of a rank's device with which the fit began. `warnings` were shown before.
    """

    records: Mapping[str, Record]
    unfinished: Mapping[str, int]
    forecasts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    surveys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device_bytes: int = 0
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Journal:
    """A JSON-lines file. The first line identifies the fit; nothing is read or written before `open` or `append`.

    `when_damaged` says how to mend a damaged one.
    """

    path: Path
    when_damaged: str = "start over with --fresh"

    def open(self, *, fingerprint: str, device_bytes: int = 0, options: Mapping[str, str] | None = None) -> History:
        """Start a journal with the memory of a rank's device, or read the existing one.

        A torn last line is cut off: the driver died while it wrote, and the trial of that line will run again. A
        journal of another fit is started anew where none of its trials counts, as those whose fault their user mends.
        Raises InputError when the journal belongs to another fit, which names the `options` that differ, cannot be
        read, or is damaged, which names the line.
        """
        header = {"kind": "header", "version": VERSION, "fingerprint": fingerprint, "device_bytes": device_bytes}
        header |= {"options": dict(options)} if options else {}
        rows = self.begin(header, self._holds_trials)
        match rows[0]:
            case {"kind": "header", "version": int(version), "fingerprint": str(known)} if (version, known) != (
                VERSION,
                fingerprint,
            ):
                raise make_other_fit_error(self.path, rows[0].get("options"), options)
            case {"kind": "header", "version": int(), "fingerprint": str(), "device_bytes": int(began_with)}:
                return replace(self._replay(rows[1:]), device_bytes=began_with)
            case _:
                raise self.make_damage_error(1)

    def read_options(self) -> Mapping[str, str] | None:
        """Return the options of the fit whose journal this is; None where it does not tell them."""
        with contextlib.suppress(InputError, IndexError):
            return self.read_rows()[0].get("options")
        return None

    def begin(
        self, header: Mapping[str, Any], holds: Callable[[Sequence[dict[str, Any]]], bool]
    ) -> list[dict[str, Any]]:
        """Return the rows, `header` alone for a new journal, and for one with another header that `holds` nothing."""
        rows = self.read_rows()
        is_header = bool(rows) and rows[0].get("kind") == "header"
        if is_header and rows[0] != header and not holds(rows):
            self._cut(0)
            rows = []
        if not rows:
            self.append(header)
        return rows or [dict(header)]

    def _holds_trials(self, rows: Sequence[dict[str, Any]]) -> bool:
        """Whether something is lost with the journal: a trial that counts or was under way, or a forecast."""
        if rows[0].get("version") != VERSION:
            return any(row.get("kind") in _OF_TRIALS for row in rows)
        history = self._replay(rows[1:])
        return bool(history.records or history.unfinished or history.forecasts)

    def _cut(self, size: int) -> None:
        try:
            os.truncate(self.path, size)
        except OSError as error:
            raise make_write_error(self.path, error) from None

    def write_start(self, trial: Trial) -> None:
        """Note that a trial begins to run."""
        self.append({"kind": "started", "key": trial_key(trial)})

    def write_record(self, record: Record) -> None:
        """Write down a finished trial."""
        self.append({"kind": "finished", "key": trial_key(record.trial), "record": asdict(record)})

    def write_forecast(self, trial: Trial, forecast: Mapping[str, Any]) -> None:
        """Write down the forecast of a probe's trial."""
        self.append({"kind": "forecast", "key": trial_key(trial), "forecast": forecast})

    def write_warning(self, text: str) -> None:
        """Write down a warning that was shown."""
        self.append({"kind": "warned", "text": text})

    def write_survey(self, digest: str, survey: Mapping[str, Any]) -> None:
        """Write down the facts of a workload; a probe has several workloads."""
        self.append({"kind": "survey", "key": digest, "survey": survey})

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one line, whole or not at all. Raises the error of `make_write_error`."""
        line = (json.dumps(row) + "\n").encode()
        try:
            # Unbuffered: a buffer would try once more on close, after the cut, and leave the end of the line behind.
            with open(self.path, "ab", buffering=0, opener=open_without_waiting) as file:
                check_is_file(os.fstat(file.fileno()), str(self.path))
                before = file.tell()
                try:
                    while line:
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                except BaseException:
                    os.ftruncate(file.fileno(), before)
                    raise
        except OSError as error:
            raise make_write_error(self.path, error) from None

    def read_rows(self) -> list[dict[str, Any]]:
        """Return the rows. An unfinished last line is cut off where it may be the start of a row; else it is damage.

        Raises InputError for a file that cannot be read or is damaged.
        """
        if not os.path.lexists(self.path):
            return []
        data = read_file(self.path, most=LARGEST_RECORD, hint="give another --out")
        *lines, torn = data.split(b"\n")
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise self.make_damage_error(number)
            rows.append(row)
        written = torn.rstrip(b"\0")  # a power cut can leave zeros where the end of the line was to come
        if written[: len(_ROW_START)] != _ROW_START[: len(written)]:
            raise self.make_damage_error(len(lines) + 1)
        if torn:
            self._cut(len(data) - len(torn))
        return rows

    def _replay(self, rows: Sequence[dict[str, Any]]) -> History:
        records: dict[str, Record] = {}
        unfinished: dict[str, int] = {}
        forecasts: dict[str, Mapping[str, Any]] = {}
        surveys: dict[str, Mapping[str, Any]] = {}
        warnings: list[str] = []
        for number, row in enumerate(rows, 2):  # line 1 is the header
            match row:
                case {"kind": "started", "key": str(key)}:
                    unfinished[key] = unfinished.get(key, 0) + 1
                case {"kind": "forecast", "key": str(key), "forecast": dict(forecast)}:
                    forecasts[key] = forecast
                case {"kind": "survey", "key": str(key), "survey": dict(survey)}:
                    surveys[key] = survey
                case {"kind": "warned", "text": str(text)}:
                    warnings.append(text)
                case {"kind": "interrupted", "key": str(key)}:
                    unfinished.pop(key, None)
                case {"kind": "finished", "key": str(key), "record": record}:
                    unfinished.pop(key, None)
                    try:
                        records[key] = read_record(record)
                        if trial_key(records[key].trial) != key:
                            raise ValueError("it is the record of another trial")
                    except ValueError as error:
                        raise self.make_damage_error(number, str(error)) from None
                case _:
                    raise self.make_damage_error(number)
        has_fit = any(isinstance(record.outcome, Fit) for record in records.values())
        records = {key: record for key, record in records.items() if not _may_be_fixed(record.outcome, has_fit)}
        return History(records, unfinished, forecasts, surveys, warnings=warnings)

    def make_damage_error(self, number: int, why: str = "this line is no journal entry") -> InputError:
        """The error for a line, counted from 1."""
        return InputError(f"is damaged: {why}", place=f"{self.path}:{number}", hint=self.when_damaged)


def _may_be_fixed(outcome: Outcome, has_fit: bool) -> bool:
    """Whether a trial is to run again: a package, a file or the machine may be fixed by now.

    A config that DeepSpeed refuses where another one fits is refused for its rung or its knobs, which stay the same.
    So is a micro batch that the model or its script cannot be trained with.
    """
    if is_machines_fault(outcome):
        return True
    if not isinstance(outcome, Failed) or outcome.action not in ("fix_code", "fix_config"):
        return False
    is_of_knobs = outcome.action == "fix_config" or outcome.wants_larger_batch or outcome.own_batch is not None
    return not (has_fit and is_of_knobs)


def keep_warnings(
    listen: Callable[[AnyEvent], None], journal: Journal, past: History
) -> tuple[Callable[[AnyEvent], None], list[str]]:
    """Return a listener that journals new warnings, and the list of all, which grows."""
    warnings = list(past.warnings)

    def warn(text: str) -> None:
        warnings.append(text)
        journal.write_warning(text)

    return record_warnings(listen, warnings, warn), warnings


def record_warnings(
    listen: Callable[[AnyEvent], None], known: Container[str], write: Callable[[str], None]
) -> Callable[[AnyEvent], None]:
    """Return a listener that writes down the warnings that are not `known`, and passes all events on to `listen`."""

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Note) and event.warns and event.text not in known:
            write(event.text)
        listen(event)

    return hear


class OtherFitError(InputError):
    """A file was written for another question, so that it does not answer this one."""


def make_other_fit_error(
    path: Path, there: Mapping[str, str] | None = None, here: Mapping[str, str] | None = None
) -> OtherFitError:
    """Return the error about a file of another fit. It names the options that differ `there` from `here`."""
    differing = "the workload, the settings, the device or a version differs"
    if isinstance(there, Mapping) and here:
        names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
        changes = (
            f"{name}: {there.get(name, 'not given')} there, {here.get(name, 'not given')} here" for name in names
        )
        differing = "; ".join(changes) or "a setting of the search differs"
    return OtherFitError(
        f"belongs to another fit ({differing})",
        place=str(path),
        hint="give another --out, or --fresh to start over",
    )


def read_record(data: Mapping[str, Any]) -> Record:
    """The inverse of `asdict(record)`. Raises ValueError that names the field that is wrong."""
    return read_as(Record, data)


JOURNAL, RUN_JOURNAL = "journal.jsonl", "run.jsonl"  # of a fit or a probe, and of a run
STUDY = "study.jsonl"
TRACEBACK = "internal-error.txt"  # in logs/, where a fit failed before its journal
# A trial during which the driver died this often does not run again: it may be the cause.
_MOST_STARTS = 3
# Files that a fit or a probe writes beside its journal. Without a journal, files of these names are the user's.
RESULTS = (
    "report.json", "report.html", "ds_config.json", "ds_config_hf.json", "ds_config_lightning.json", "accelerate.yaml",
    "ds_config_so_far.json", "ds_config_rehearsed.json", "probe.json", "probe.csv", STUDY,
)  # fmt: skip
_GIVEN_UP = Failed(
    failure="infrastructure",
    rank=-1,
    phase="start",
    evidence=f"autods itself died {_MOST_STARTS} times while this trial ran",
    action="nothing",
    advice="look for the kernel's OOM killer: dmesg | grep -i 'killed process'",
)
_LOCK = ".autods.lock"  # no other program's: it shows that a fit used the folder
_LEAST_FREE_BYTES = 2**20  # what the logs and results of a trial may need


class Execute(Protocol):
    """Runs a trial, whose number is `id`."""

    def __call__(self, trial: Trial, *, id: int) -> Record: ...


@contextlib.contextmanager
def workspace(out: Path, *, fresh: bool, user: str = "fit") -> Iterator[Path]:
    """Create the output folder and lock it, so that no second `user` of it writes there.

    `fresh` removes the results of an earlier fit first. Raises InputError when the folder cannot be used,
    EnvironmentBroken when the disk is full, and Interrupted on Ctrl-C.
    """
    _check_not_foreign(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / _LOCK, "a", opener=open_without_waiting)
    except OSError as error:
        raise make_write_error(out, error, hint="give another folder with --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another {user} is running in this folder", place=str(out), hint="wait for it, or give another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        if fresh:
            shutil.rmtree(out / "logs", ignore_errors=True)
            for name in RESULTS:
                (out / name).unlink(missing_ok=True)
            (out / JOURNAL).unlink(missing_ok=True)  # last: it marks the other files as results of a fit
        check_disk_space(out)
        try:
            yield out
        except KeyboardInterrupt:
            raise Interrupted("stopped; every rank is gone and the journal is kept") from None
        except OSError as error:
            check_disk_space(out)
            broken = make_write_error(Path(str(error.filename or out)), error)
            if isinstance(broken, EnvironmentBroken):
                raise broken from error
            raise


def check_disk_space(out: Path) -> None:
    """Raises EnvironmentBroken when the disk is full or the folder gone. Ranks would fail of it with other errors."""
    if not out.is_dir():
        raise EnvironmentBroken(
            f"{out}: the folder of the results is gone\n"
            "  was it removed or unmounted? With it back, the same command goes on"
        )
    check_space(out, _LEAST_FREE_BYTES, "a trial")


def _check_not_foreign(out: Path) -> None:
    """Raises InputError for a folder with files of the user's that results would overwrite."""
    if _holds_a_fit(out):
        return
    logs = [path for path in out.glob("logs/*") if path.name != TRACEBACK]
    if foreign := [path for name in (JOURNAL, *RESULTS) if os.path.exists(path := out / name)] + logs:
        raise InputError(
            f"holds {foreign[0].relative_to(out)} and no journal of a fit, so nothing is written over",
            place=str(out),
            hint="give another --out, such as a new folder in it",
        )


def _holds_a_fit(out: Path) -> bool:
    """Whether a fit used the folder before. One that was killed early has left its lock and no journal."""
    return is_journal(out / JOURNAL) or os.path.exists(out / _LOCK)


def is_journal(path: Path) -> bool:
    """Whether the file begins as the journal of a fit, a probe or a run does."""
    with contextlib.suppress(OSError), open(path, "rb", opener=open_without_waiting) as file:
        return file.read(len(_HEADER_START)) == _HEADER_START
    return False


@dataclass(slots=True)
class TrialStore:
    """Answers trials from the journal, runs those that it lacks, and writes each finished one down. Thread-safe.

    `adapt` returns each trial as it is to run. `learn` is called with each record.
    `running` holds the ids of the trials that run now.
    """

    journal: Journal
    past: History
    execute: Execute
    listen: Listener
    records: list[Record] = field(default_factory=list)
    adapt: Callable[[Trial], Trial] = lambda trial: trial
    learn: Callable[[Record], None] = lambda record: None
    running: set[int] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def known_records(self) -> Sequence[Record]:
        """The records of the journal when it was opened, and those since."""
        return (*self.past.records.values(), *self.records)

    def run(self, trial: Trial, execute: Execute | None = None) -> Record:
        """Return the record of a trial, from the journal or by running it (with `execute`, where given)."""
        trial = self.adapt(trial)
        key = trial_key(trial)
        known = self.past.records.get(key)
        record = known or self._run(trial, key, execute or self.execute)
        with self.lock:
            self.records.append(record)
            self.running.discard(record.id)
            self.learn(record)
            self.listen(TrialFinished(record=record, replayed=known is not None))
        return record

    def _run(self, trial: Trial, key: str, execute: Execute) -> Record:
        with self.lock:
            known = (*(record.id for record in (*self.past.records.values(), *self.records)), *self.running)
            self.running.add(id := 1 + max(known, default=0))
            if self.past.unfinished.get(key, 0) >= _MOST_STARTS:
                record = Record(id=id, trial=trial, outcome=_GIVEN_UP, seconds=0.0)
                self.journal.write_record(record)
                return record
            check_disk_space(self.journal.path.parent)
            self.journal.write_start(trial)
            self.listen(TrialStarted(id=id, trial=trial))
        try:
            record = execute(trial, id=id)
        except KeyboardInterrupt:  # the user stopped the fit, and the trial is not to blame
            with self.lock:
                self.journal.append({"kind": "interrupted", "key": key})
            raise
        record = self._judge_hang(record)
        if not isinstance(record.outcome, Fit):
            check_disk_space(self.journal.path.parent)
        with self.lock:
            self.journal.write_record(record)
        return record

    def _judge_hang(self, record: Record) -> Record:
        """The record; where an earlier trial was stuck at the same line of the user's code, that code is to blame."""
        outcome = record.outcome
        if not isinstance(outcome, Failed) or outcome.hung_at is None:
            return record
        with self.lock:
            earlier = [each.outcome for each in self.records if isinstance(each.outcome, Failed)]
        is_proven = any(each.hung_at == outcome.hung_at for each in earlier)
        return replace(record, outcome=blame_code_for_hang(outcome)) if is_proven else record
