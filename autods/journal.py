"""The append-only record of a fit. A fit that was killed reads it and goes on where it stopped.

One JSON object a line: a header with the question (`Settings.fingerprint`), then `started` and `finished` trials.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import InputError
from .outcomes import Failed, Outcome, is_machines_fault
from .typed import read_as
from .values import Record, Trial

VERSION = 1

_ROW_START = b'{"kind": "'


def key_of(trial: Trial) -> str:
    """Equal for trials that ask the same question; what the journal looks answers up by."""
    said = asdict(trial)
    if not trial.conditions:
        del said["conditions"]  # only a probe has them: keys of fits stay what they were
    if trial.examined_from_s is None:
        del said["examined_from_s"]
    return json.dumps(said, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Past:
    """What a journal says: finished trials by key, how often a trial was started without an end, and what was
    forecast for finished ones, as it was written. surveys: digest of a workload → what a look at it found."""

    records: Mapping[str, Record]
    unfinished: Mapping[str, int]
    forecasts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    surveys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Journal:
    """`path` is not touched before `open` or `append`."""

    path: Path

    def open(self, *, fingerprint: str) -> Past:
        """Start a journal, or read the one that is there.

        Raises InputError when it answers another question, cannot be read, or a line is damaged (its number is said).
        A torn last line (the driver died while writing) is cut off: that trial was running and will be run again.
        """
        lines = self._whole_lines()
        if not lines:
            self.append({"kind": "header", "version": VERSION, "fingerprint": fingerprint})
            return Past({}, {})
        self._check_header(lines[0], fingerprint)
        return self._replay(lines[1:])

    def started(self, trial: Trial) -> None:
        """Written before the trial runs."""
        self.append({"kind": "started", "key": key_of(trial)})

    def interrupted(self, trial: Trial) -> None:
        """Written when the user stopped the fit under it: no fault of the trial."""
        self.append({"kind": "interrupted", "key": key_of(trial)})

    def finished(self, record: Record) -> None:
        """Written as soon as the outcome is known."""
        self.append({"kind": "finished", "key": key_of(record.trial), "record": asdict(record)})

    def foreseen(self, trial: Trial, forecast: Mapping[str, Any]) -> None:
        """What had been forecast for a finished trial, beside what it measured."""
        self.append({"kind": "forecast", "key": key_of(trial), "forecast": forecast})

    def surveyed(self, digest: str, survey: Mapping[str, Any]) -> None:
        """What a look at a workload found; a probe has several of them."""
        self.append({"kind": "survey", "key": digest, "survey": survey})

    def append(self, row: Mapping[str, Any]) -> None:
        """One line, whole or not at all. Raises InputError when the disk is full or the folder is read-only."""
        line = (json.dumps(row) + "\n").encode()
        try:
            # Unbuffered: a buffer would try once more on close, after the cut, and leave the end of the line behind.
            with open(self.path, "ab", buffering=0) as file:
                before = file.tell()
                try:
                    while line:
                        line = line[file.write(line) :]
                    os.fsync(file.fileno())
                except BaseException:
                    os.ftruncate(file.fileno(), before)
                    raise
        except OSError as error:
            raise self._unusable("written", error, "free some space, or give another --out") from None

    def _whole_lines(self) -> list[dict[str, Any]]:
        """The rows; a line without an end is cut off when it may be the start of a row, and is damage otherwise."""
        data = self._read()
        whole, _, torn = data.rpartition(b"\n")
        lines = whole.split(b"\n") if b"\n" in data else []
        rows = [self._row(number, line) for number, line in enumerate(lines, 1)]
        # A power cut can leave zeros where the end of the line was to come.
        written = torn.rstrip(b"\0")
        if written[: len(_ROW_START)] != _ROW_START[: len(written)]:
            raise self._damaged(len(lines) + 1)
        if torn:
            self._cut(len(data) - len(torn))
        return rows

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise self._unusable("read", error, "give another --out") from None

    def _cut(self, size: int) -> None:
        try:
            os.truncate(self.path, size)
        except OSError as error:
            raise self._unusable("written", error, "give another --out") from None

    def _row(self, number: int, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise self._damaged(number) from None
        if not isinstance(row, dict):
            raise self._damaged(number)
        return row

    def _replay(self, rows: list[dict[str, Any]]) -> Past:
        records: dict[str, Record] = {}
        unfinished: dict[str, int] = {}
        forecasts: dict[str, Mapping[str, Any]] = {}
        surveys: dict[str, Mapping[str, Any]] = {}
        for number, row in enumerate(rows, 2):  # line 1 is the header
            match row:
                case {"kind": "started", "key": str(key)}:
                    unfinished[key] = unfinished.get(key, 0) + 1
                case {"kind": "forecast", "key": str(key), "forecast": dict(forecast)}:
                    forecasts[key] = forecast
                case {"kind": "survey", "key": str(key), "survey": dict(survey)}:
                    surveys[key] = survey
                case {"kind": "interrupted", "key": str(key)}:
                    unfinished.pop(key, None)
                case {"kind": "finished", "key": str(key), "record": record}:
                    unfinished.pop(key, None)
                    try:
                        records[key] = read_record(record)
                    except ValueError as error:
                        raise self._damaged(number, str(error)) from None
                    if _may_be_mended(records[key].outcome):
                        del records[key]  # asked again
                case _:
                    raise self._damaged(number)
        return Past(records, unfinished, forecasts, surveys)

    def _check_header(self, row: Mapping[str, Any], fingerprint: str) -> None:
        if row.get("kind") != "header":
            raise self._damaged(1)
        if row.get("version") != VERSION or row.get("fingerprint") != fingerprint:
            raise InputError(
                "is the journal of another fit (the workload, the settings or the version differ)",
                where=str(self.path),
                mend="give another --out, or --fresh to start over",
            )

    def _damaged(self, number: int, why: str = "this line is no journal entry") -> InputError:
        return InputError(f"is damaged: {why}", where=f"{self.path}:{number}", mend="start over with --fresh")

    def _unusable(self, act: str, error: OSError, mend: str) -> InputError:
        return InputError(f"cannot be {act}: {error.strerror}", where=str(self.path), mend=mend)


def _may_be_mended(outcome: Outcome) -> bool:
    """By now, and without a change of the workload that its digest shows: a package, a data file, the machine."""
    return is_machines_fault(outcome) or (isinstance(outcome, Failed) and outcome.action in ("fix_code", "fix_config"))


def read_record(data: Mapping[str, Any]) -> Record:
    """The inverse of `asdict(record)`. Raises ValueError that says which field is wrong."""
    return read_as(Record, data)
