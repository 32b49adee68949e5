"""The results file of one device: read, merged cell by cell, written whole; and what its forecasts were worth."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
VERSION = 1
KEY = ("model", "precision", "rung", "world_size", "card_bytes", "micro_batch", "checkpointing")

Row = dict[str, Any]


def find_answer(output: str) -> Row | None:
    """The JSON object that one of our programs printed, the last line that is one; None where there is none."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def path_of(device_name: str) -> Path:
    """'NVIDIA H100 80GB HBM3' → …/results/nvidia-h100-80gb-hbm3.json."""
    return FOLDER / f"{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}.json"


def empty() -> Row:
    """A file before anything was measured."""
    return {
        "version": VERSION,
        "device": {},
        "versions": {},
        "left_out": {},
        "context": [],
        "questions": {},
        "cells": [],
    }


def read(path: Path) -> Row:
    """What is known so far; empty where there is no file. Raises ValueError for another kind of file."""
    if not path.exists():
        return empty()
    said = json.loads(path.read_text())
    if not isinstance(said, dict) or said.get("version") != VERSION:
        raise ValueError(f"{path} is no results file of this version; move it away")
    return said


def write(path: Path, said: Row) -> None:
    """Whole or not at all, with its summary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({**said, "summary": summary(said["cells"])}, indent=1) + "\n")
    os.replace(temporary, path)


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal for the same question."""
    return tuple(row[name] for name in KEY)


def merged(said: Row, row: Row) -> Row:
    """With this cell in place of an earlier one of the same question."""
    cells = [one for one in said["cells"] if key_of(one) != key_of(row)]
    return {**said, "cells": [*cells, row]}


def known(said: Mapping[str, Any], row: Mapping[str, Any]) -> Row | None:
    """The cell that answers this question; a failure that was not memory's is worth another try."""
    found = next((one for one in said["cells"] if key_of(one) == key_of(row)), None)
    return found if found is not None and found["outcome"]["kind"] != "failed" else None


def answered(said: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether this question need not be asked: it was, or a smaller micro batch ran out already."""
    if known(said, row) is not None:
        return True
    full = (cell for cell in said["cells"] if ran_out(cell) and cell["micro_batch"] < row["micro_batch"])
    return any(key_of({**row, "micro_batch": cell["micro_batch"]}) == key_of(cell) for cell in full)


def summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """By rung, and of all: how far the forecast of the device's bytes was off, and what the verdicts were worth.

    Errors are forecast over measured − 1, of trials that ran. A false cannot_fit: it ran. A false fit: the device ran
    out. tight is neither. beside: NVML's count less the allocator's, bytes.
    """
    foreseen = [cell for cell in cells if cell.get("forecast") and not cell["forecast"].get("problem")]
    rungs = dict.fromkeys(cell["rung"] for cell in foreseen)
    return {name: _tally([cell for cell in foreseen if name in ("all", cell["rung"])]) for name in ("all", *rungs)}


def _tally(cells: Sequence[Mapping[str, Any]]) -> Row:
    ran = [cell for cell in cells if fits(cell)]
    out = [cell for cell in cells if ran_out(cell)]
    errors = [error_of(cell) for cell in ran]
    sizes = sorted(abs(error) for error in errors)
    verdicts = [cell["forecast"]["verdict"] for cell in (*ran, *out)]
    return {
        "cells": len(ran) + len(out),
        "median_error": quantile(sizes, 0.5),
        "p95_error": quantile(sizes, 0.95),
        "worst_error": max(errors, key=abs, default=None),
        "within_interval": sum(_within(cell) for cell in ran),
        "false_cannot_fit": sum(cell["forecast"]["verdict"] == "cannot_fit" for cell in ran),
        "false_fits": sum(cell["forecast"]["verdict"] == "fits" for cell in out),
        "tight": verdicts.count("tight"),
    }


def fits(cell: Mapping[str, Any]) -> bool:
    """It ran."""
    return cell["outcome"]["kind"] == "fit"


def ran_out(cell: Mapping[str, Any]) -> bool:
    """Of the device's memory."""
    return cell["outcome"]["kind"] == "out_of_memory" and cell["outcome"]["tier"] == "device"


def error_of(cell: Mapping[str, Any]) -> float:
    """Of a cell that ran: what was forecast for the device within its limit, over what was measured."""
    return float(cell["forecast"]["at_limit_bytes"] / cell["measured"]["device"] - 1)


def _within(cell: Mapping[str, Any]) -> bool:
    """Whether the interval, moved to what the limit lets the allocator cache, holds what was measured."""
    said = cell["forecast"]
    moved = said["at_limit_bytes"] - said["peak_bytes"]
    return bool(said["low_bytes"] <= cell["measured"]["device"] <= said["high_bytes"] + max(0, moved))


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that is not below that share of them."""
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)] if ordered else None


def table(said: Mapping[str, Any]) -> str:
    """For people."""
    lines = [f"{'rung':22}" + "".join(name.rjust(width) for name, width in _HEADS)]
    for rung, row in summary(said["cells"]).items():
        errors = "".join(_percent(row[name], sign) for name, sign in _ERRORS)
        lines.append(
            f"{rung:22}{row['cells']:6}{errors}{row['false_cannot_fit']:18}{row['false_fits']:12}{row['tight']:7}"
        )
    lines += [f"{name}: {shown_answer(answer)}" for name, answer in said.get("questions", {}).items()]
    lines += [line_of(cell) for cell in said["cells"] if "step_s" in (cell.get("forecast") or {})]
    lines += [f"left out: {what}: {why}" for what, why in said["left_out"].items()]
    return "\n".join(lines)


def shown_answer(answer: Mapping[str, Any]) -> str:
    """In a word: whether autods' assumption holds, or why nobody knows."""
    if "not_asked" in answer:
        return f"not answered: {answer['not_asked']}"
    return {True: "as autods assumes", False: "NOT as autods assumes", None: "measured"}[answer["holds"]]


_HEADS = (
    ("cells", 6), ("median", 9), ("p95", 9), ("worst", 9), ("false cannot_fit", 18), ("false fits", 12), ("tight", 7),
)  # fmt: skip
_ERRORS = (("median_error", ""), ("p95_error", ""), ("worst_error", "+"))


def _percent(value: float | None, sign: str) -> str:
    return f"{'–':>9}" if value is None else f"{value:{sign}.1%}".rjust(9)


def shown(cells: Iterable[Mapping[str, Any]]) -> str:
    """Each cell in a line: what it measured beside what was forecast, and its speed."""
    return "\n".join(line_of(cell) for cell in cells)


def line_of(cell: Mapping[str, Any]) -> str:
    """'gpt2-small zero2 16.0 GiB card, micro batch 1: 3.2 / 3.5 / 4.6 GiB (forecast 3.4, fits), 52.1 samples/s'."""
    card = "whole card" if cell["card_bytes"] is None else f"{cell['card_bytes'] / 2**30:g} GiB card"
    plain = "" if cell["checkpointing"] else ", without checkpointing"
    head = f"{cell['model']} {cell['rung']} {card}, micro batch {cell['micro_batch']}{plain}:"
    said = cell.get("forecast") or {}
    if not fits(cell):
        outcome = cell["outcome"]
        tail = f" (forecast: {said['verdict']})" if "verdict" in said else ""
        return f"{head} {outcome['kind']} {outcome.get('tier') or ''} {outcome.get('evidence', '')[:80]}{tail}"
    names = ("device_allocated", "device_in_use", "device")
    sizes = " / ".join(_gib(cell["measured"].get(name)) for name in names)
    tail = f" (forecast {_gib(said['at_limit_bytes'])}, {said['verdict']})" if "at_limit_bytes" in said else ""
    step = f", {said['step_s']:.3f} s a step forecast, bound by {said['bound']}" if "step_s" in said else ""
    measured_s = statistics.median(cell["outcome"]["step_s"])
    return f"{head} {sizes} GiB{tail}, {cell['samples_per_second']:.2f} samples/s, {measured_s:.3f} s a step{step}"


def _gib(size: float | None) -> str:
    return "–" if size is None else f"{size / 2**30:.2f}"
