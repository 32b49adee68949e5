"""The forecast of each cell that was measured. Needs no card: it may be made later, on another machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu_cells import source

from autods.config.catalogue import Machine, find_by_driver_name
from autods.forecast.predict.calibration import observe_trial
from autods.forecast.predict.memory_model import compute_rank_memory, read_overheads
from autods.forecast.predict.replay import replay
from autods.forecast.predict.verdict import forecast_speed, judge_memory
from autods.forecast.simulate import ProcessSimulator, SimulationFailed
from autods.forecast.values import EngineSpec, Simulation
from autods.schema import read_as
from autods.types import Fit, ModelFacts
from autods.units import format_bytes

Row = dict[str, Any]
_SAME = ("model", "precision", "rung", "world_size", "card_bytes", "checkpointing")


def machine_of(device: Mapping[str, Any]) -> Machine | None:
    """The catalogue's machine with such cards, with as many cards and cores as this one; None where it has none."""
    known = find_by_driver_name(device["name"]) if device["kind"] == "cuda" else None
    return known and replace(known, gpus=device["ranks"], cores=device["cores"], sockets=1)


def foreseen(
    cells: Sequence[Mapping[str, Any]], device: str, usable_bytes: int, machine: Machine | None = None
) -> Iterator[Row]:
    """Each cell with its forecast, those of one engine together. usable_bytes: of a rank's device as it is.

    With `machine` the forecast has the seconds of a step, too.
    """

    def engine(cell: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(str(cell[name]) for name in _SAME)

    with tempfile.TemporaryDirectory(prefix="autods-gpu-") as folder:
        for model, of_model in groupby(sorted(cells, key=engine), key=lambda cell: cell["model"]):
            with ProcessSimulator(source(model, Path(folder)), processes=1) as simulator:
                for _, same in groupby(list(of_model), key=engine):
                    yield from _of_engine(simulator, list(same), device, usable_bytes, machine)


def _of_engine(
    simulator: ProcessSimulator,
    cells: Sequence[Mapping[str, Any]],
    device: str,
    usable_bytes: int,
    machine: Machine | None,
) -> Iterator[Row]:
    asks = [ask_of(cell, device, usable_bytes) for cell in cells]
    try:
        with simulator.engine(asks[0]) as running:
            for cell, ask in zip(cells, asks, strict=True):
                simulated = running.measure(cell["micro_batch"])
                step = {} if machine is None else step_of(replace(ask, machine=machine), simulated)
                yield {**cell, "forecast": {**said_of(cell, ask, simulated), **step}}
    except SimulationFailed as failed:
        problem = {"problem": " ".join(str(failed.problem).split())}
        yield from ({**cell, "forecast": problem} for cell in cells)


def ask_of(cell: Mapping[str, Any], device: str, usable_bytes: int) -> EngineSpec:
    """The engine that the trial ran."""
    facts = ModelFacts(**cell["facts"])
    return EngineSpec(
        rung=cell["rung"], ds_config=cell["ds_config"], world_size=cell["world_size"],
        ranks_per_node=cell["world_size"], device_bytes=cell["card_bytes"] or usable_bytes, device=device,
        checkpointing=cell["checkpointing"] and facts.checkpointing,
    )  # fmt: skip


def said_of(cell: Mapping[str, Any], ask: EngineSpec, simulated: Simulation) -> Row:
    """Bytes a rank. at_limit_bytes: what is expected on the card within the limit, inside_bytes of it by constants.

    beside_bytes of it lie outside torch's allocator. unlimited: what that reserves and gives out on a card without
    limit, but for inside_bytes. peak_bytes, low and high: what the card must hold: a trial may
    reserve more where it has more. The verdict is that of the tier that trials limit, the device.
    """
    forecast = judge_memory(ask, simulated, limits={"device": ask.device_bytes})
    need = compute_rank_memory(ask, simulated, read_overheads(), expandable=False)
    held = forecast.memory["device"]
    at_limit = held.peak_bytes
    if cell["outcome"]["kind"] == "fit":
        pair = observe_trial(ask, simulated, read_as(Fit, cell["outcome"]))
        at_limit = at_limit if pair is None else pair.predicted_bytes + need.outside_allocator.peak_bytes
    inside = need.device.peak_bytes - need.tensors_bytes
    trace = simulated.traces.get("device")
    roomy = replay(trace) if trace is not None and ask.device == "cuda" else None
    return {
        "verdict": forecast.verdict,
        "reason": forecast.reason,
        "low_bytes": held.low_bytes,
        "peak_bytes": held.peak_bytes,
        "high_bytes": held.high_bytes,
        "live_bytes": need.live_bytes,
        "at_limit_bytes": at_limit,
        "inside_bytes": inside,
        "beside_bytes": need.outside_allocator.peak_bytes,
        "unlimited_bytes": roomy and roomy.peak_reserved_bytes,
        "unlimited_allocated_bytes": roomy and roomy.peak_allocated_bytes,
        "host_bytes": need.host.peak_bytes,
        "seconds": simulated.seconds,
    }


def step_of(ask: EngineSpec, simulated: Simulation) -> Row:
    """The seconds of the engine's step with their bounds; nothing where its machine lacks a rate."""
    speed = forecast_speed(ask, simulated, accumulation=1)
    if speed is None:
        return {}
    step = speed.step
    return {
        "step_s": step.seconds,
        "low_step_s": step.low_seconds,
        "high_step_s": step.high_seconds,
        "bound": step.bound,
    }


def line_of(cell: Mapping[str, Any]) -> str:
    """For who waits."""
    said = cell["forecast"]
    what = said.get("problem") or f"{format_bytes(said['at_limit_bytes'])}, {said['verdict']}"
    return f"forecast: {cell['model']} {cell['rung']}, micro batch {cell['micro_batch']}: {what}"
