"""The append-only record of a fit. A fit that was killed reads it and goes on where it stopped.

One JSON object a line: a header with the question (`Settings.fingerprint`), then `started` and `finished` trials.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import InputError
from .values import Failed, Fit, Knobs, Outcome, OutOfMemory, Record, Steps, TierUse, Timing, Trial

VERSION = 1


def key_of(trial: Trial) -> str:
    """Equal for trials that ask the same question; what the journal looks answers up by."""
    return json.dumps(asdict(trial), sort_keys=True)


@dataclass(frozen=True, slots=True)
class Past:
    """What a journal says: finished trials by key, and how often a trial was started without an end."""

    records: Mapping[str, Record]
    unfinished: Mapping[str, int]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Journal:
    """`path` is not touched before `open` or `append`."""

    path: Path

    def open(self, *, fingerprint: str) -> Past:
        """Start a journal, or read the one that is there.

        Raises InputError when it answers another question or a line in its midst is damaged. A torn last line (the
        driver died while writing) is cut off: that trial was running and will be run again.
        """
        if not self.path.exists():
            self.append({"kind": "header", "version": VERSION, "fingerprint": fingerprint})
            return Past({}, {})
        lines = self._whole_lines()
        if not lines:
            self.append({"kind": "header", "version": VERSION, "fingerprint": fingerprint})
            return Past({}, {})
        self._check_header(lines[0], fingerprint)
        return _replay(lines[1:])

    def started(self, trial: Trial) -> None:
        """Written before the trial runs."""
        self.append({"kind": "started", "key": key_of(trial)})

    def finished(self, record: Record) -> None:
        """Written as soon as the outcome is known."""
        self.append({"kind": "finished", "key": key_of(record.trial), "record": asdict(record)})

    def append(self, row: Mapping[str, Any]) -> None:
        """One line, whole or not at all. Raises InputError when the disk is full or the folder is read-only."""
        line = (json.dumps(row) + "\n").encode()
        try:
            with open(self.path, "ab") as file:
                before = file.tell()
                try:
                    file.write(line)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.ftruncate(file.fileno(), before)
                    raise
        except OSError as error:
            raise InputError(
                f"cannot be written: {error.strerror}",
                where=str(self.path),
                mend="free some space, or give another --out",
            ) from None

    def _whole_lines(self) -> list[dict[str, Any]]:
        data = self.path.read_bytes()
        whole, _, torn = data.rpartition(b"\n")
        if torn:
            os.truncate(self.path, len(data) - len(torn))
        rows = []
        for number, line in enumerate(whole.split(b"\n"), 1):
            if not line and number == 1 and not whole:
                break
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError("not an object")
            except ValueError:
                raise self._damaged(number) from None
            rows.append(row)
        return rows

    def _check_header(self, row: Mapping[str, Any], fingerprint: str) -> None:
        if row.get("kind") != "header":
            raise self._damaged(1)
        if row.get("version") != VERSION or row.get("fingerprint") != fingerprint:
            raise InputError(
                "is the journal of another fit (the workload, the settings or the version differ)",
                where=str(self.path),
                mend="give another --out, or --fresh to start over",
            )

    def _damaged(self, number: int) -> InputError:
        return InputError(
            "is damaged: this line is no journal entry", where=f"{self.path}:{number}", mend="start over with --fresh"
        )


def _replay(rows: list[dict[str, Any]]) -> Past:
    records: dict[str, Record] = {}
    unfinished: dict[str, int] = {}
    for row in rows:
        match row.get("kind"):
            case "started":
                unfinished[row["key"]] = unfinished.get(row["key"], 0) + 1
            case "finished":
                unfinished.pop(row["key"], None)
                records[row["key"]] = read_record(row["record"])
    return Past(records, unfinished)


def read_record(data: Mapping[str, Any]) -> Record:
    """The inverse of `asdict(record)`; the outcome's `kind` says which it is."""
    trial = data["trial"]
    return Record(
        id=data["id"],
        seconds=data["seconds"],
        trial=Trial(**{**trial, "knobs": Knobs(**trial["knobs"]), "steps": Steps(**trial["steps"])}),
        outcome=read_outcome(data["outcome"]),
    )


def read_outcome(data: Mapping[str, Any]) -> Outcome:
    """An outcome from its JSON."""
    match data["kind"]:
        case "fit":
            return Fit(
                **{
                    **data,
                    "memory": {tier: TierUse(**use) for tier, use in data["memory"].items()},
                    "step_s": tuple(data["step_s"]),
                    "losses": tuple(data["losses"]),
                    "timing": Timing(**data["timing"]),
                }
            )
        case "out_of_memory":
            return OutOfMemory(**data)
        case _:
            return Failed(**data)
