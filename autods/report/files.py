"""A report as JSON, and the files of a fit: `report.json`, and the config in the form of each that trains with it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..journal import read_record
from ..outcomes import TIERS, TierUse
from ..trainer_config import for_lightning, for_trainer
from ..typed import read_as
from ..values import Knobs, Record, Skipped
from .ecosystems import accelerate_yaml, trainer_arguments
from .launching import ACCELERATE, DS_CONFIG, DS_CONFIG_HF, DS_CONFIG_LIGHTNING, commands
from .result import Report, Throughput

REPORT = "report.json"
SO_FAR = "ds_config_so_far.json"


def to_dict(report: Report) -> dict[str, Any]:
    """Plain JSON values by the contract of report.json: every key is there, what is unknown is null."""
    row = {item.name: getattr(report, item.name) for item in fields(Report)}
    row["knobs"] = asdict(report.knobs) if report.knobs else None
    row["throughput"] = asdict(report.throughput) if report.throughput else None
    row["memory"] = {tier: asdict(use) if (use := report.memory.get(tier)) else None for tier in TIERS}
    row["trials"] = [_trial_row(record) for record in report.trials]
    row["skipped"] = [asdict(item) for item in report.skipped]
    row["launch"] = _launch(report)
    plain: dict[str, Any] = _plain(row)
    return plain


def from_dict(data: Mapping[str, Any]) -> Report:
    """The inverse of `to_dict`. Raises InputError when `data` is not a report; keys it does not know are dropped."""
    try:
        row = {item.name: data[item.name] for item in fields(Report) if item.name in data}
        if data["status"] not in ("fit", "nothing_fits"):
            raise ValueError(f"status is {data['status']!r}")
        row["knobs"] = read_as(Knobs, data["knobs"]) if data["knobs"] else None
        row["throughput"] = read_as(Throughput, data["throughput"]) if data["throughput"] else None
        row["memory"] = {tier: read_as(TierUse, use) for tier, use in data["memory"].items() if use}
        row["forecast"] = tuple(data.get("forecast", ()))
        row["trials"] = tuple(_record(trial) for trial in data["trials"])
        row["skipped"] = tuple(read_as(Skipped, item) for item in data.get("skipped", ()))
        return Report(**row)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"is not the report of a fit: {error!r}", mend="start over with --fresh") from None


def write(report: Report, folder: Path) -> None:
    """Write `report.json` and, when something fits, the configs; each is whole or not there at all.

    Raises InputError naming the file when the folder cannot be written or the disk is full.
    """
    for name, text in _configs(report).items():
        if text is None:
            _remove(folder / name)  # one of an earlier fit would pass for this one's
        else:
            write_whole(folder / name, text)
    write_whole(folder / REPORT, as_json(to_dict(report)))  # last: where it stands, the fit is finished
    _remove(folder / SO_FAR)


def write_so_far(ds_config: Mapping[str, Any], folder: Path) -> None:
    """The best config that is known while the fit goes on: measured, not certified. Raises InputError as `write`."""
    write_whole(folder / SO_FAR, as_json(ds_config))


def read(folder: Path) -> Report:
    """The finished fit in this folder. Raises InputError when its report is missing or damaged."""
    path = folder / REPORT
    try:
        return from_dict(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (ValueError, InputError):
        raise InputError("is not the report of a fit", where=str(path), mend="start over with --fresh") from None


def _configs(report: Report) -> dict[str, str | None]:
    """File → its text; None where nothing fits."""
    if report.ds_config is None:
        return dict.fromkeys((DS_CONFIG, DS_CONFIG_HF, DS_CONFIG_LIGHTNING, ACCELERATE))
    lightning = (report.question.get("script") or {}).get("kind") == "lightning"
    return {
        DS_CONFIG: as_json(report.ds_config),
        DS_CONFIG_HF: as_json(for_trainer(report.ds_config)),
        DS_CONFIG_LIGHTNING: as_json(for_lightning(report.ds_config)) if lightning else None,
        ACCELERATE: accelerate_yaml(report, str(Path(report.out) / DS_CONFIG)),
    }


def _launch(report: Report) -> dict[str, Any] | None:
    """Command lines, and the Trainer's arguments; None where nothing fits."""
    if report.ds_config is None or report.knobs is None:
        return None
    return {**commands(report), "trainer_arguments": trainer_arguments(report, str(Path(report.out) / DS_CONFIG_HF))}


def _trial_row(record: Record) -> dict[str, Any]:
    """The contract calls a trial's purpose its phase; the rest of the trial is there so that it can be read back."""
    row = asdict(record.trial)
    return {
        "id": record.id,
        "rung": row.pop("rung"),
        "knobs": row.pop("knobs"),
        "phase": row.pop("purpose"),
        "outcome": asdict(record.outcome),
        "seconds": record.seconds,
        **row,
    }


def _record(row: Mapping[str, Any]) -> Record:
    shown = ("id", "phase", "outcome", "seconds")
    trial = {"purpose": row["phase"]} | {key: value for key, value in row.items() if key not in shown}
    outcome = dict(row["outcome"])
    if outcome["kind"] == "fit":  # JSON has no NaN: it was written as null
        outcome["losses"] = [math.nan if loss is None else loss for loss in outcome["losses"]]
        outcome["spread"] = math.nan if outcome["spread"] is None else outcome["spread"]
    return read_record({"id": row["id"], "seconds": row["seconds"], "trial": trial, "outcome": outcome})


def _plain(value: Any) -> Any:
    """JSON has no tuple, no path and no NaN."""
    match value:
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case float() if not math.isfinite(value):
            return None
        case None | bool() | int() | float() | str():
            return value
        case _:
            return str(value)


def as_json(data: Any) -> str:
    return json.dumps(_plain(data), indent=2) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Write beside, then rename: a reader sees the old file or the new one. Raises InputError naming the file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        _remove(beside)
        raise InputError(
            f"cannot be written: {error.strerror}", where=str(path), mend="free some space, or give another --out"
        ) from None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return
