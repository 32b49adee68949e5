"""Write and read results as JSON and CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..config.deepspeed import to_lightning_config, to_trainer_config
from ..errors import InputError
from ..forecast.values import PHASES, RungForecast, TierForecast
from ..journal import read_record
from ..schema import read_as
from ..types import TIERS, TIERS_OF_A_NODE, Knobs, Record, Skipped, Tier, TierUse
from .launch import (
    ACCELERATE,
    DS_CONFIG,
    DS_CONFIG_HF,
    DS_CONFIG_LIGHTNING,
    accelerate_yaml,
    launch_commands,
    trainer_arguments,
)
from .results import PROBE, PROBE_CSV, CellResult, ClosestRung, Forecast, ProbeReport, Report, SiteForecast, Throughput

REPORT = "report.json"
SO_FAR = "ds_config_so_far.json"


def to_dict(report: Report) -> dict[str, Any]:
    """Plain JSON values for report.json. Every key is present; unknown values are null."""
    row = {item.name: getattr(report, item.name) for item in fields(Report)}
    row["knobs"] = asdict(report.knobs) if report.knobs else None
    row["throughput"] = asdict(report.throughput) if report.throughput else None
    row["memory"] = {tier: asdict(use) if (use := report.memory.get(tier)) else None for tier in TIERS}
    row["trials"] = [_trial_row(record) for record in report.trials]
    row["skipped"] = [asdict(item) for item in report.skipped]
    row["closest"] = asdict(report.closest) if report.closest else None
    row["launch"] = _launch(report)
    plain: dict[str, Any] = _plain(row)
    return plain


def from_dict(data: Mapping[str, Any]) -> Report:
    """The inverse of `to_dict`. Unknown keys are dropped. Raises InputError when `data` is not a report."""
    try:
        row = {item.name: data[item.name] for item in fields(Report) if item.name in data}
        if data["status"] not in ("fit", "nothing_fits"):
            raise ValueError(f"status is {data['status']!r}")
        row["knobs"] = read_as(Knobs, data["knobs"]) if data["knobs"] else None
        row["throughput"] = read_as(Throughput, data["throughput"]) if data["throughput"] else None
        row["memory"] = {tier: read_as(TierUse, use) for tier, use in data["memory"].items() if use}
        row["closest"] = read_as(ClosestRung, data["closest"]) if data.get("closest") else None
        row["forecast"] = tuple(data.get("forecast", ()))
        row["trials"] = tuple(_record(trial) for trial in data["trials"])
        row["skipped"] = tuple(read_as(Skipped, item) for item in data.get("skipped", ()))
        return Report(**row)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"is not the report of a fit: {error!r}", hint="start over with --fresh") from None


def write(report: Report, folder: Path) -> None:
    """Write `report.json` and, when something fits, the configs. Each file is written whole or not at all.

    Raises InputError naming the file when the folder cannot be written or the disk is full.
    """
    for name, text in _configs(report).items():
        if text is None:
            _remove(folder / name)  # a file of an earlier fit would pass for a result of this one
        else:
            write_whole(folder / name, text)
    write_whole(folder / REPORT, as_json(to_dict(report)))  # last, because its presence means that the fit is finished
    _remove(folder / SO_FAR)


def write_so_far(ds_config: Mapping[str, Any], folder: Path) -> None:
    """Write the best config so far, which is measured and not certified. Raises InputError like `write`."""
    write_whole(folder / SO_FAR, as_json(ds_config))


def read(folder: Path) -> Report:
    """The finished fit in this folder. Raises InputError when its report is missing or damaged."""
    path = folder / REPORT
    try:
        return from_dict(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", place=str(path)) from None
    except (ValueError, InputError):
        raise InputError("is not the report of a fit", place=str(path), hint="start over with --fresh") from None


def _configs(report: Report) -> dict[str, str | None]:
    """Return the text of each file by its name; None for a file that does not apply."""
    if report.ds_config is None:
        return dict.fromkeys((DS_CONFIG, DS_CONFIG_HF, DS_CONFIG_LIGHTNING, ACCELERATE))
    lightning = report.script is not None and report.script.kind == "lightning"
    return {
        DS_CONFIG: as_json(report.ds_config),
        DS_CONFIG_HF: as_json(to_trainer_config(report.ds_config)),
        DS_CONFIG_LIGHTNING: as_json(to_lightning_config(report.ds_config)) if lightning else None,
        ACCELERATE: accelerate_yaml(report, str(Path(report.out) / DS_CONFIG)),
    }


def _launch(report: Report) -> dict[str, Any] | None:
    """The launch commands and the Trainer's arguments; None where nothing fits."""
    if report.ds_config is None or report.knobs is None:
        return None
    return {
        **launch_commands(report),
        "trainer_arguments": trainer_arguments(report, str(Path(report.out) / DS_CONFIG_HF)),
    }


def _trial_row(record: Record) -> dict[str, Any]:
    """A trial by the contract, which calls its purpose `phase`, and its other fields for reading it back."""
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
    not_of_trial = ("id", "phase", "outcome", "seconds")
    trial = {"purpose": row["phase"]} | {key: value for key, value in row.items() if key not in not_of_trial}
    outcome = dict(row["outcome"])
    if outcome["kind"] == "fit":  # JSON has no NaN: it was written as null
        outcome["losses"] = [math.nan if loss is None else loss for loss in outcome["losses"]]
        outcome["spread"] = math.nan if outcome["spread"] is None else outcome["spread"]
    return read_record({"id": row["id"], "seconds": row["seconds"], "trial": trial, "outcome": outcome})


def _plain(value: Any) -> Any:
    """The value in terms of JSON, which has no tuple, path or NaN."""
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
    """Indented JSON with a final newline."""
    return json.dumps(_plain(data), indent=2) + "\n"


def write_whole(path: Path, text: str) -> None:
    """Replace the file at once: a reader sees the old or the new one. Raises InputError naming the file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _remove(temporary)
        raise InputError(
            f"cannot be written: {error.strerror}", place=str(path), hint="free some space, or give another --out"
        ) from None


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def write_probe(report: ProbeReport, folder: Path) -> None:
    """Write `probe.json` and `probe.csv`. Raises InputError naming a file that cannot be written."""
    write_csv(report, folder / PROBE_CSV)
    write_whole(folder / PROBE, as_json(probe_to_dict(report)))


def write_csv(report: ProbeReport, path: Path) -> None:
    """Write the table as CSV. Raises InputError like `write`."""
    write_whole(path, to_csv(report))


def check_writable(path: Path) -> None:
    """Raises InputError if the file could not be written later."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error.strerror) from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise _unwritable(path, "is a folder" if path.is_dir() else "its folder is read-only")


def _unwritable(path: Path, why: str | None) -> InputError:
    return InputError(f"cannot be written: {why}", place=str(path), hint="give another file")


_NOTHING = TierForecast(peak_bytes=0, low_bytes=0, high_bytes=0)


def plan_to_dict(forecast: Forecast) -> dict[str, Any]:
    """Plain JSON values. The rungs of a single machine stand at the top level, those of several in `machines`."""
    common = {
        "status": forecast.status,
        "workload": _workload(forecast),
        "assumed": list(forecast.all_assumed),
        "versions": dict(forecast.versions),
        "seconds": round(forecast.seconds, 3),
    }
    if len(forecast.sites) == 1:
        return {**_site(forecast.sites[0]), **common}
    return {"machines": [_site(site) for site in forecast.sites], **common}


def _site(forecast: SiteForecast) -> dict[str, Any]:
    site = forecast.site
    hardware = {
        **asdict(site.machine),
        "world_size": site.world_size,
        "nodes": site.nodes,
        "ranks_per_node": site.ranks_per_node,
        "precision": site.precision,
        "micro_batch": site.micro_batch,
    }
    rungs = [rung_to_dict(rung, site.ranks_per_node) for rung in forecast.rungs]
    return {"status": forecast.status, "best": forecast.best_rung, "rungs": rungs, "hardware": hardware}


def rung_to_dict(rung: RungForecast, ranks_per_node: int) -> dict[str, Any]:
    """Bytes per rank, and for host, pinned and NVMe also per node. A tier is null where nothing was forecast."""
    row: dict[str, Any] = {
        "rung": rung.rung,
        "verdict": rung.verdict,
        "reason": rung.reason,
        "micro_batch": rung.micro_batch,
        "largest_micro_batch": rung.largest_micro_batch,
        "decides": rung.decides,
        "exact": True,  # every figure is simulated; the key stays for readers of earlier plans
        "assumed": list(rung.assumed),
        "seconds": round(rung.seconds, 3),
    }
    for tier in TIERS:
        row[tier] = _tier(rung, tier, ranks_per_node) if rung.memory else None
    return row


def _tier(rung: RungForecast, tier: Tier, ranks_per_node: int) -> dict[str, Any]:
    forecast = rung.memory.get(tier, _NOTHING)
    sizes = {"peak_bytes": forecast.peak_bytes, "low_bytes": forecast.low_bytes, "high_bytes": forecast.high_bytes}
    limit = {"limit_bytes": forecast.limit_bytes}
    if tier in TIERS_OF_A_NODE:
        each = {name: -(-size // ranks_per_node) for name, size in sizes.items()}
        return {**each, "node": {**sizes, **limit}}
    if tier == "pinned":
        return {**sizes, "node": {name: size * ranks_per_node for name, size in sizes.items()}}
    return {
        **sizes,
        **limit,
        "live_peak_bytes": rung.live_peak_bytes,
        "by_phase": {phase: rung.by_phase.get(phase, 0) for phase in PHASES},
        "breakdown": dict(rung.breakdown),
    }


def _workload(forecast: Forecast) -> dict[str, Any]:
    source, facts = forecast.source, forecast.facts
    return {
        "name": source.name,
        "kind": source.kind,
        "path": source.path,
        "task": source.task,
        "seq_len": facts.tokens_per_sample,
        "target_len": source.target_len,
        "checkpointing": forecast.checkpointing,
        "zero_init": forecast.zero_init,
        "device": forecast.device,
        **{name: value for name, value in asdict(facts).items() if name not in ("checkpointing", "tokens_per_sample")},
        "can_checkpoint": facts.checkpointing,
    }


def probe_to_dict(report: ProbeReport) -> dict[str, Any]:
    """Plain JSON values; unknown values are null."""
    row = {item.name: getattr(report, item.name) for item in fields(ProbeReport)}
    row["cells"] = [_cell_row(cell) for cell in report.cells]
    row["compared"] = dict(zip(("cell", "by"), report.compared, strict=True)) if report.compared else None
    row["trials"] = [_trial_row(record) for record in report.trials]
    plain: dict[str, Any] = _plain(row)
    return plain


def _cell_row(cell: CellResult) -> dict[str, Any]:
    row = asdict(cell)
    if cell.ratio is not None:
        row["ratio"]["differs"] = cell.ratio.differs
    if cell.capacity is not None:
        row["capacity"]["said"] = row["capacity"].pop("explanation")  # the key that readers of probe.json know
    row["memory"] = {tier: row["memory"].get(tier) for tier in TIERS}
    return row


def to_csv(report: ProbeReport) -> str:
    """One line a cell: its values, then its measurements; bytes and seconds are plain numbers."""
    text = io.StringIO()
    rows = [dict(_csv_fields(report, cell)) for cell in report.cells]
    writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)), restval="")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_fields(report: ProbeReport, cell: CellResult) -> Iterator[tuple[str, Any]]:
    yield "cell", cell.number
    for name in report.axes:
        yield name, _csv_value(cell.values.get(name))
    figures = ("samples_per_second", "tokens_per_second", "spread", "step_s", "sent_bytes")
    for name in ("status", "same_as", "repeats", *figures):
        yield name, _csv_value(getattr(cell, name))
    for name in ("times", "low", "high", "differs"):
        yield f"ratio_{name}", _csv_value(getattr(cell.ratio, name, None))
    for tier in TIERS:
        use = cell.memory.get(tier)
        yield f"{tier}_peak_bytes", _csv_value(use.peak_bytes if use else None)
        yield f"{tier}_limit_bytes", _csv_value(use.limit_bytes if use else None)
    for name in ("tier", "missing_bytes"):
        yield name, _csv_value(getattr(cell, name))
    if cell.capacity is not None:
        for name in ("forecast", "verified", "refused", "exact"):
            yield f"largest_{name}", _csv_value(getattr(cell.capacity, name))
    reasons = [cell.reason, cell.capacity.explanation if cell.capacity else "", *cell.unheeded.values()]
    yield "reason", "; ".join(" ".join(reason.split()) for reason in reasons if reason)


def _csv_value(value: object) -> object:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else value
