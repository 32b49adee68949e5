"""Write and read results as JSON and CSV files."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..config.deepspeed import to_lightning_config, to_trainer_config
from ..config.trainers import DS_CONFIG, DS_CONFIG_HF, DS_CONFIG_LIGHTNING, SCRIPT_KINDS
from ..errors import InputError
from ..files import LARGEST_RECORD, read_file, write_whole
from ..forecast.predict.step_time import Speed, StepTime
from ..forecast.values import PHASES, RungForecast, TierForecast
from ..journal import JOURNAL, RUN_JOURNAL
from ..schema import check_plain, read_as, read_known
from ..types import TIERS, TIERS_OF_A_NODE, Record, Tier, TierUse
from .launch import (
    ACCELERATE,
    DS_CONFIG_REHEARSED,
    LAUNCHERS,
    LINES_BESIDE,
    accelerate_yaml,
    launch_commands,
    launch_lines,
    trainer_arguments,
)
from .results.fit import FitReport, Parity
from .results.measured import find_measured
from .results.plan import PlanReport, SiteForecast
from .results.probe import Capacity, CellResult, ProbeReport, Ratio
from .results.run import RunReport

CSV_BEGINS = (b"cell",)
REPORT, PROBE, PROBE_CSV, RUN = "report.json", "probe.json", "probe.csv", "run.json"
SO_FAR = "ds_config_so_far.json"
Finished = TypeVar("Finished", FitReport, ProbeReport, RunReport)
_MEASURE: Any = Literal["samples", "tokens"]  # of a probe's ratios


def to_dict(report: FitReport) -> dict[str, Any]:
    """Plain JSON values for report.json. Every key is present; unknown values are null.

    `rehearsed` tells that the simulated GPU answered the trials, so that nothing is proven.
    """
    rehearsed = report.question.rehearsed_on is not None
    is_launchable = report.ds_config is not None and report.knobs is not None and not rehearsed
    row = _plain(replace(report, forecast=()))
    row["forecast"] = [rung_to_dict(forecast, report.question.ranks_per_node) for forecast in report.forecast]
    nothing = {name: row[name] or {} for name in ("certificate", "hardware")}
    launch = _launch(report) if is_launchable else None
    return {**row, **nothing, "rehearsed": rehearsed, "memory": _all_tiers(report.memory), "launch": launch}


def _launch(report: FitReport) -> dict[str, Any]:
    """The command of each launcher, null where the config does not reach the script; the lines that go with them."""
    script, lines, arguments = report.question.script, list(launch_lines(report)), None
    if script is None or SCRIPT_KINDS[script.kind].sets_sizes:
        arguments = list(trainer_arguments(report, str(Path(report.out) / DS_CONFIG_HF)))
    return {
        **dict.fromkeys(LAUNCHERS),
        **launch_commands(report),
        "trainer_arguments": arguments,
        **{name: [text for each, text in lines if each == name] for name in LINES_BESIDE},
    }


def from_dict(data: Mapping[str, Any]) -> FitReport:
    """The inverse of `to_dict`. Unknown keys are dropped. Raises InputError when `data` is not a report."""
    try:
        memory = {tier: use for tier, use in data["memory"].items() if use}
        trials = [_record_from_row(row) for row in data["trials"]]
        certificate = dict(data["certificate"])
        if parity := certificate.get("parity"):
            infinite = ["largest_difference"] if parity["largest_difference"] is None else []  # it is never unknown
            infinite += parity.get("infinite", ())  # older reports have none
            known = {name: value for name, value in parity.items() if name != "infinite"}
            certificate["parity"] = known | dict.fromkeys(infinite, math.inf)
        values = {"memory": memory, "trials": trials, "certificate": certificate or None, "forecast": ()}
        report = read_known(FitReport, {**data, **values, "hardware": data["hardware"] or None})
        report = replace(report, forecast=tuple(_rung_from_row(row) for row in data["forecast"]))
        if report.spread is None and report.rung is not None and report.knobs is not None:  # it has one trial's rate
            config = find_measured(report.trials, report.rung, report.knobs)
            return report if config is None else report.answer_with(config, report.knobs)
        return report
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"is not the report of a fit: {error!r}", hint="start over with --fresh") from None


def write(report: FitReport, folder: Path) -> None:
    """Write `report.json` and, when something fits, the configs. Each file is written whole or not at all.

    The folder is made if it is not there.
    Raises the error of `errors.make_write_error` for a file that cannot be written.
    """
    texts: dict[str, str] = {}
    if report.ds_config is not None and report.question.rehearsed_on is not None:
        texts[DS_CONFIG_REHEARSED] = as_json(report.ds_config)
    elif report.ds_config is not None:
        texts[DS_CONFIG] = as_json(report.ds_config)
        texts[DS_CONFIG_HF] = as_json(to_trainer_config(report.ds_config))
        texts[ACCELERATE] = accelerate_yaml(report, str(Path(report.out) / DS_CONFIG))
        script = report.question.script
        if script is not None and SCRIPT_KINDS[script.kind].config_file == DS_CONFIG_LIGHTNING:
            texts[DS_CONFIG_LIGHTNING] = as_json(to_lightning_config(report.ds_config))
    with suppress(OSError):  # the first file says what is wrong
        folder.mkdir(parents=True, exist_ok=True)
    for name in (DS_CONFIG, DS_CONFIG_HF, DS_CONFIG_LIGHTNING, DS_CONFIG_REHEARSED, ACCELERATE):
        if name in texts:
            write_whole(folder / name, texts[name])
        else:
            _remove(folder / name)  # a file of an earlier fit would pass for a result of this one
    write_whole(folder / REPORT, as_json(to_dict(report)))  # last, because its presence means that the fit is finished
    _remove(folder / SO_FAR)


def write_so_far(ds_config: Mapping[str, Any], folder: Path) -> None:
    """Write the best config so far, which is measured and not certified. Raises like `write`."""
    write_whole(folder / SO_FAR, as_json(ds_config))


def read(folder: Path) -> FitReport:
    """The finished fit in this folder. Raises InputError when its report is missing or damaged."""
    return _read_finished(folder / REPORT, from_dict, "fit")


def _read_finished(path: Path, make: Callable[[dict[str, Any]], Finished], command: str) -> Finished:
    """Make the report in this file. Raises InputError when it is missing, or is not one of that command."""
    if not path.exists() and any((path.parent / name).exists() for name in (JOURNAL, RUN_JOURNAL)):
        problem = "what is in this folder has not ended: it runs, or was interrupted"
        raise InputError(problem, place=str(path.parent), hint="its command goes on with it, and reports at the end")
    text = read_file(path, most=LARGEST_RECORD, hint=_name_finished(path))
    try:
        if not isinstance(data := json.loads(text), dict):
            raise ValueError("it is no JSON object")
        check_plain(data, finite=True)  # what is not finite is written as null
        return make(data)
    except (ValueError, RecursionError, InputError):
        hint = f"`autods {command} --fresh` starts over"
        raise InputError(f"is not the report of a {command}", place=str(path), hint=hint) from None


def _name_finished(missing: Path) -> str:
    """What to give in place of the folder without this report: one below it that has one, the newest if several."""
    below = sorted(missing.parent.glob(f"*/{missing.name}"), key=lambda path: path.stat().st_mtime)
    if len(below) > 1:
        return f"{missing.parent} holds {len(below)} of them: give {below[-1].parent}, the newest"
    return f"give {below[0].parent}" if below else "give the folder that a finished fit, probe or run wrote"


def _record_from_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_plain` for a record, as the values that `read_as` takes."""
    not_of_trial = ("id", "phase", "outcome", "seconds")
    trial = {"purpose": row["phase"]} | {key: value for key, value in row.items() if key not in not_of_trial}
    outcome = dict(row["outcome"])
    if outcome["kind"] == "fit":  # JSON has no NaN: it was written as null
        for name in ("losses", "gradient_norms"):
            outcome[name] = [math.nan if value is None else value for value in outcome.get(name, ())]
        outcome["spread"] = math.nan if outcome["spread"] is None else outcome["spread"]
    return {"id": row["id"], "seconds": row["seconds"], "trial": trial, "outcome": outcome}


def _plain(value: Any) -> Any:
    """The value in terms of JSON, which has no dataclass, tuple, path or NaN; some keys have other names there."""
    match value:
        case Record(trial=trial):  # the contract calls the purpose `phase`; the trial's other fields are for reading it
            names = ("id", "rung", "knobs", "phase", "outcome", "seconds")
            row = _fields(trial) | {"id": value.id, "outcome": value.outcome, "seconds": value.seconds}
            row["phase"] = row.pop("purpose")
            return _plain({name: row[name] for name in names} | row)
        case CellResult():
            return _plain(_fields(value)) | {"memory": _all_tiers(value.memory)}
        case Ratio():
            return _plain(_fields(value)) | {"differs": value.differs}
        case Capacity():
            row = _fields(value)
            return row | {"said": row.pop("explanation")}  # the key that readers of probe.json know
        case Parity():  # JSON has no infinity: null alone would read as unknown
            row = _fields(value)
            infinite = [name for name, size in row.items() if isinstance(size, float) and math.isinf(size)]
            return _plain(row) | {"infinite": infinite}
        case _ if is_dataclass(value):
            return _plain(_fields(value))
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


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _all_tiers(memory: Mapping[Tier, TierUse]) -> dict[str, Any]:
    """The use of each tier; null where it was not measured."""
    return {tier: _plain(memory.get(tier)) for tier in TIERS}


def as_json(data: Any) -> str:
    """Indented JSON with a final newline."""
    return json.dumps(_plain(data), indent=2) + "\n"


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)


def write_probe(report: ProbeReport, folder: Path) -> None:
    """Write `probe.json` and `probe.csv`. Raises like `write`."""
    write_csv(report, folder / PROBE_CSV)
    write_whole(folder / PROBE, as_json(probe_to_dict(report)))


def write_csv(report: ProbeReport, path: Path) -> None:
    """Write the table as CSV. Raises like `write`."""
    write_whole(path, to_csv(report))


_NOTHING = TierForecast(peak_bytes=0, low_bytes=0, high_bytes=0)


def plan_to_dict(forecast: PlanReport) -> dict[str, Any]:
    """Plain JSON values. The rungs of a single machine stand at the top level, those of several in `machines`."""
    common = {
        "status": forecast.status,
        "workload": _workload(forecast),
        "timeline": None if forecast.timeline is None else asdict(forecast.timeline),
        "assumed": list(forecast.assumed),
        "versions": dict(forecast.versions),
        "seconds": round(forecast.seconds, 3),
    }
    if len(forecast.sites) == 1:
        return {**_site(forecast, forecast.sites[0]), **common}
    enough = forecast.smallest_enough
    return {
        "machines": [_site(forecast, site) for site in forecast.sites],
        "ranking": [site.site.machine.name for site in forecast.ranked_sites],
        "smallest_enough": None if enough is None else enough.site.machine.name,
        **common,
    }


def _site(plan: PlanReport, forecast: SiteForecast) -> dict[str, Any]:
    site = forecast.site
    hardware = asdict(site.machine) | {name: getattr(site, name) for name in ("world_size", "nodes", "ranks_per_node")}
    hardware |= {"precision": site.precision, "micro_batch": site.micro_batch}
    rungs = []
    for rung in forecast.rungs:
        training = plan.forecast_training(forecast, rung)
        row = rung_to_dict(rung, site.ranks_per_node)
        rungs.append({**row, "training": None if training is None else asdict(training)})
    alternatives = [
        {
            **rung_to_dict(each.forecast, site.ranks_per_node),
            "checkpointing": each.checkpointing,
            "switched": each.switched,
            "opt_in": each.opt_in,
        }
        for each in forecast.alternatives
    ]
    alone = forecast.unaccumulated
    return {
        "status": forecast.status,
        "best": forecast.best_rung,
        "rungs": rungs,
        "alternatives": alternatives,
        "partitioned": None if forecast.partitioned is None else asdict(forecast.partitioned),
        "unaccumulated": None if alone is None else rung_to_dict(alone, site.ranks_per_node),
        "runs_full": forecast.runs_full,
        "hardware": hardware | {"price_per_gpu_hour": site.price_per_gpu_hour},
    }


_SWITCHES = ("expandable", "offloads_inputs")


def rung_to_dict(rung: RungForecast, ranks_per_node: int) -> dict[str, Any]:
    """Bytes per rank, and for host, pinned and NVMe also per node. A tier is null where nothing was forecast."""
    names = ("rung", "verdict", "reason", "micro_batch", "largest_micro_batch", "decides", *_SWITCHES)
    return {
        **{name: getattr(rung, name) for name in names},
        "exact": True,  # every figure is simulated; the key stays for readers of earlier plans
        "assumed": list(rung.assumed),
        "seconds": round(rung.seconds, 3),
        **{tier: _tier(rung, tier, ranks_per_node) if rung.memory else None for tier in TIERS},
        "step": None if rung.speed is None else _step(rung.speed),
    }


def _rung_from_row(row: Mapping[str, Any]) -> RungForecast:
    """The inverse of `rung_to_dict`."""
    memory: dict[Tier, TierForecast] = {}
    for tier in TIERS if row["device"] is not None else ():
        sizes = row[tier]["node"] if tier in TIERS_OF_A_NODE else row[tier]
        forecast = read_known(TierForecast, sizes)
        if forecast != _NOTHING:
            memory[tier] = forecast
    device = row["device"] or {"live_peak_bytes": 0, "by_phase": {}, "breakdown": {}}
    names = ("rung", "verdict", "reason", "micro_batch", "largest_micro_batch", "assumed", "seconds")
    known = {name: row[name] for name in names} | {name: device[name] for name in ("live_peak_bytes", "breakdown")}
    by_phase = {phase: size for phase, size in device["by_phase"].items() if size}
    later = {name: row.get(name, False) for name in _SWITCHES}  # older reports have none
    host_by_phase = {} if row["host"] is None else row["host"]["node"].get("by_phase", {})
    known |= {"by_phase": by_phase, "host_by_phase": host_by_phase, **later}
    rung = read_as(RungForecast, known)
    return replace(rung, memory=memory, speed=None if row["step"] is None else _speed_from_row(row["step"]))


def _speed_from_row(row: Mapping[str, Any]) -> Speed:
    """The inverse of `_step`; the seconds that the host issues operators are not in it."""
    step = read_known(StepTime, {**row, "spent": row["breakdown"], "issued_seconds": 0.0})
    return replace(read_known(Speed, {**row, "step": asdict(step)}), step=step)


def _step(speed: Speed) -> dict[str, Any]:
    """Seconds of an optimizer step at `micro_batch`; `breakdown` splits them by what they are spent on.

    `unaligned_seconds` of them are lost in matmuls whose rows do not begin at multiples of 16 bytes.
    """
    row = {**_fields(speed), **_fields(speed.step), "bound": speed.step.bound, "breakdown": dict(speed.step.spent)}
    return {name: value for name, value in row.items() if name not in ("step", "spent", "issued_seconds")}


def _tier(rung: RungForecast, tier: Tier, ranks_per_node: int) -> dict[str, Any]:
    forecast = rung.memory.get(tier, _NOTHING)
    sizes = _fields(forecast)
    limit = {"limit_bytes": sizes.pop("limit_bytes")}
    if tier in TIERS_OF_A_NODE:
        each = {name: -(-size // ranks_per_node) for name, size in sizes.items()}
        phases = {"by_phase": dict(rung.host_by_phase)} if tier == "host" else {}
        return {**each, "node": {**sizes, **limit, **phases}}
    if tier == "pinned":
        return {**sizes, "node": {name: size * ranks_per_node for name, size in sizes.items()}}
    by_phase = {phase: rung.by_phase.get(phase, 0) for phase in PHASES}
    details = {"live_peak_bytes": rung.live_peak_bytes, "by_phase": by_phase, "breakdown": dict(rung.breakdown)}
    return {**sizes, **limit, **details}


def _workload(plan: PlanReport) -> dict[str, Any]:
    source = {name: getattr(plan.source, name) for name in ("name", "kind", "path", "task", "target_len", "lora")}
    built = {name: getattr(plan, name) for name in ("checkpointing", "zero_init", "device")}
    facts = asdict(plan.facts)
    facts["can_checkpoint"] = facts.pop("checkpointing")
    del facts["tokens_per_sample"]
    return {**source, **built, **facts}


def probe_to_dict(report: ProbeReport) -> dict[str, Any]:
    """Plain JSON values; unknown values are null."""
    compared = dict(zip(("cell", "by"), report.compared, strict=True)) if report.compared else None
    return {**_plain(report), "compared": compared}


def probe_from_dict(data: Mapping[str, Any]) -> ProbeReport:
    """The inverse of `probe_to_dict`. Unknown keys are dropped. Raises InputError when `data` is not a probe."""
    try:
        compared = None
        if (row := data["compared"]) is not None:
            compared = read_as(int, row["cell"]), read_as(_MEASURE, row["by"])
        cells = [read_known(CellResult, _cell_from_row(row)) for row in data["cells"]]
        trials = [read_as(Record, _record_from_row(row)) for row in data["trials"]]
        rest = {name: value for name, value in data.items() if name not in ("cells", "trials", "compared")}
        report = read_known(ProbeReport, {**rest, "cells": (), "trials": (), "compared": None})
        return replace(report, cells=tuple(cells), trials=tuple(trials), compared=compared)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"is not the report of a probe: {error!r}", hint="start over with --fresh") from None


def _cell_from_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_plain` for a cell, as the values that `read_as` takes."""
    cell = {**row, "memory": {tier: use for tier, use in row["memory"].items() if use}}
    if (ratio := cell["ratio"]) is not None:
        cell["ratio"] = {name: value for name, value in ratio.items() if name != "differs"}
    if (capacity := cell["capacity"]) is not None:
        cell["capacity"] = {("explanation" if name == "said" else name): value for name, value in capacity.items()}
    return cell


def has_probe(folder: Path) -> bool:
    """Whether the folder holds a finished probe, and no fit."""
    return (folder / PROBE).is_file() and not (folder / REPORT).is_file()


def read_probe(folder: Path) -> ProbeReport:
    """The finished probe in this folder. Raises InputError when its report is missing or damaged."""
    return _read_finished(folder / PROBE, probe_from_dict, "probe")


def to_csv(report: ProbeReport) -> str:
    """One line a cell: its values, then its measurements; bytes and seconds are plain numbers."""
    text = io.StringIO()
    rows = [dict(_csv_fields(report, cell)) for cell in report.cells]
    writer = csv.DictWriter(text, fieldnames=list(dict.fromkeys(name for row in rows for name in row)))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: str(value).lower() if isinstance(value, bool) else value for name, value in row.items()})
    return text.getvalue()


def _csv_fields(report: ProbeReport, cell: CellResult) -> Iterator[tuple[str, Any]]:
    yield "cell", cell.number
    for name in report.axes:
        yield name, cell.values.get(name)
    figures = ("samples_per_second", "tokens_per_second", "spread", "step_s", "sent_bytes")
    for name in ("status", "same_as", "repeats", *figures):
        yield name, getattr(cell, name)
    for name in ("times", "low", "high", "differs"):
        yield f"ratio_{name}", getattr(cell.ratio, name, None)
    for tier in TIERS:
        for name in ("peak_bytes", "limit_bytes"):
            yield f"{tier}_{name}", getattr(cell.memory.get(tier), name, None)
    yield "tier", cell.tier
    yield "missing_bytes", cell.missing_bytes
    if cell.capacity is not None:
        for name in ("forecast", "verified", "refused", "exact"):
            yield f"largest_{name}", getattr(cell.capacity, name)
    reasons = [cell.reason, cell.capacity.explanation if cell.capacity else "", *cell.unheeded.values()]
    yield "reason", "; ".join(" ".join(reason.split()) for reason in reasons if reason)


def write_run(report: RunReport) -> None:
    """Write run.json into the run's folder."""
    write_whole(Path(report.out) / RUN, as_json(report.to_dict()))


def has_run(folder: Path) -> bool:
    """Whether the folder is that of a run that has ended once."""
    return (folder / RUN).is_file()


def read_run(folder: Path) -> RunReport:
    """The run of this folder. Raises InputError when its report is missing or damaged."""
    return _read_finished(folder / RUN, lambda data: read_known(RunReport, data), "run")
