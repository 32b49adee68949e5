"""What tests/gpu makes of its readings, with scripted results: no card, no trial."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "gpu"))

import gpu_constants as constants
import gpu_forecasts
import gpu_questions
import gpu_results as results
import measure
from gpu_cells import Cell, Site, cells, config_of, rungs_for

from autods.forecast.predict.memory_model import read_overheads
from autods.forecast.testing import simulate_peaks
from autods.forecast.values import Simulation, Trace
from autods.runner.testing import fit
from autods.system.host import Hardware
from autods.types import ModelFacts

MIB, GIB = 2**20, 2**30
FACTS = ModelFacts(
    parameters=10**8, largest_parameter=10**7, checkpointing=True, tokens_per_sample=64, has_optimizer=False
)
SITE = Site(device="cuda", ranks=1, usable_bytes=79 * GIB, precision="bf16", rungs=("ddp", "zero2-offload"))


def cell(
    *, measured: int = 10 * GIB, said: int = 10 * GIB, inside: int = 40 * MIB, verdict: str = "fits",
    kind: str = "fit", world: int = 1, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    row = Cell(model="gpt2-small", precision="bf16", rung="ddp", world_size=world, card_bytes=None, micro_batch=1)
    outcome = {"kind": kind} if kind != "out_of_memory" else {"kind": kind, "tier": "device", "evidence": "CUDA"}
    forecast = {
        "verdict": verdict, "at_limit_bytes": said, "inside_bytes": inside, "beside_bytes": 900 * MIB,
        "low_bytes": int(said * 0.95), "peak_bytes": said, "high_bytes": int(said * 1.05),
    }  # fmt: skip
    return {
        **row.as_row(), "outcome": outcome, "measured": {"device": measured, "device_beside": 900 * MIB},
        "samples_per_second": 1.0, "forecast": forecast, **more,
    }  # fmt: skip


def file_of(*rows: dict[str, Any], context: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    device = {"kind": "cuda", "name": "NVIDIA H100", "driver": "580.95", "usable_bytes": 79 * GIB, "ranks": 1}
    said = {"device": device, "versions": {"torch": "2.11.0+cu130"}, "cells": list(rows), "context": context or []}
    return {**results.empty(), **said}


def readings(world: int, context: int, kernels: int, collective: int) -> dict[str, Any]:
    sizes = {"context": context, "kernels": kernels, "collectives": collective}
    steps = [{"step": name, "held_bytes": size * MIB, "allocated_bytes": 0} for name, size in sizes.items()]
    return {"device": "cuda", "world_size": world, "steps": steps}


# ---- the results file


def test_a_cell_that_is_measured_again_takes_the_place_of_the_first() -> None:
    said = results.merged(results.merged(file_of(), cell(measured=GIB)), cell(measured=2 * GIB))
    assert [one["measured"]["device"] for one in said["cells"]] == [2 * GIB]
    assert len(results.merged(said, cell(micro_batch=2))["cells"]) == 2


def test_a_cell_is_known_unless_it_died_of_something_else() -> None:
    said = file_of(cell(kind="out_of_memory"), cell(micro_batch=2, kind="failed"))
    assert results.known(said, cell()) is not None
    assert results.known(said, cell(micro_batch=2)) is None
    assert results.known(said, cell(micro_batch=4)) is None


def test_what_ran_out_at_a_micro_batch_is_not_asked_for_a_larger_one() -> None:
    said = file_of(cell(kind="out_of_memory", micro_batch=2))
    assert results.answered(said, cell(micro_batch=2))
    assert results.answered(said, cell(micro_batch=4))
    assert not results.answered(said, cell(micro_batch=1))
    assert not results.answered(said, cell(micro_batch=4, rung="zero2"))


def test_a_file_is_written_whole_with_its_summary_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    assert results.read(path) == results.empty()
    results.write(path, file_of(cell()))
    assert results.read(path)["cells"] == [cell()]
    assert json.loads(path.read_text())["summary"]["all"]["cells"] == 1
    path.write_text("[]")
    with pytest.raises(ValueError, match="no results file"):
        results.read(path)


def test_the_summary_counts_errors_and_wrong_verdicts() -> None:
    said = results.summary([
        cell(measured=10 * GIB, said=11 * GIB),
        cell(measured=10 * GIB, said=9 * GIB, verdict="cannot_fit", micro_batch=2),
        cell(kind="out_of_memory", verdict="fits", micro_batch=4),
        cell(kind="out_of_memory", verdict="tight", micro_batch=8),
        cell(kind="failed", micro_batch=16),
    ])["ddp"]  # fmt: skip
    assert said["cells"] == 4
    assert said["median_error"] == pytest.approx(0.1)
    assert said["worst_error"] == pytest.approx(0.1) or said["worst_error"] == pytest.approx(-0.1)
    assert (said["false_cannot_fit"], said["false_fits"], said["tight"]) == (1, 1, 1)


def test_without_a_forecast_the_table_shows_no_summary() -> None:
    bare = {key: value for key, value in cell().items() if key != "forecast"}
    said = {**file_of(bare), "left_out": {"autotuner": "Ray is not installed"}}
    assert results.summary(said["cells"])["all"]["median_error"] is None
    assert "left out: autotuner: Ray is not installed" in results.table(said)


def test_a_device_has_one_file_by_its_name() -> None:
    assert results.path_of("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


# ---- what is asked


def test_a_card_is_measured_as_it_is_and_as_every_smaller_one() -> None:
    asked = list(cells("gpt2-xl", SITE, (16 * GIB, 80 * GIB)))
    assert [one.card_bytes for one in asked] == [None, None, None, None, 16 * GIB, 16 * GIB]
    assert [one.checkpointing for one in asked] == [True, False, True, False, True, True]
    t5 = [one.card_bytes for one in cells("t5-3b", SITE, (40 * GIB,)) if one.rung == "ddp"]
    assert t5 == [None, None, None, 16 * GIB, 16 * GIB]


def test_an_emulated_card_has_the_buckets_of_its_size() -> None:
    def bucket(card: int | None) -> int:
        row = Cell(model="tiny", precision="bf16", rung="zero2-offload", world_size=1, card_bytes=card, micro_batch=1)
        return int(config_of(row, FACTS, SITE)["zero_optimization"]["reduce_bucket_size"])

    assert bucket(GIB) < bucket(None)


def test_torchs_adam_stands_in_where_deepspeeds_cannot_be_built() -> None:
    row = Cell(model="tiny", precision="fp16", rung="zero2-offload", world_size=1, card_bytes=None, micro_batch=1)
    built = Site(**{**{name: getattr(SITE, name) for name in SITE.__slots__}, "native": ("cpu_adam",)})
    assert config_of(row, FACTS, SITE)["optimizer"]["params"]["torch_adam"] is True
    assert not config_of(row, FACTS, built)["optimizer"]["params"].get("torch_adam")
    assert config_of(row, FACTS, SITE)["fp16"] == {"enabled": True}


def test_the_nvme_rung_is_asked_for_only_with_a_folder() -> None:
    assert "zero3-nvme" not in rungs_for(None, None)
    assert "zero3-nvme" in rungs_for(None, Path("/nvme"))
    with pytest.raises(ValueError, match="there is no rung 'zero9'"):
        rungs_for("ddp,zero9", None)


def test_a_machine_without_a_card_is_told_what_it_can_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    none = Hardware(cpu="a CPU", cores=2, host_bytes=GIB, host_free_bytes=GIB, cards=())
    monkeypatch.setattr(measure, "read_hardware", lambda: none)
    assert measure.main(["gpt2"]) == measure.CANNOT
    assert "--device cpu tiny" in capsys.readouterr().err


def test_forecasts_are_made_on_a_machine_without_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = Hardware(cpu="a CPU", cores=2, host_bytes=GIB, host_free_bytes=GIB, cards=())
    monkeypatch.setattr(measure, "read_hardware", lambda: none)
    file = tmp_path / "card.json"
    known = {"kind": "cuda", "name": "NVIDIA H200", "usable_bytes": 139 * GIB, "ranks": 1, "cores": 16}
    results.write(file, {**results.empty(), "device": known, "versions": {"torch": "2.11.0"}})
    assert measure.main(["forecast", "--out", str(file)]) == 0
    said = results.read(file)
    assert (said["device"], said["versions"]) == (known, {"torch": "2.11.0"})


def test_there_is_no_part_of_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        measure.arguments(["gpt3"])
    assert "there is no part 'gpt3'" in capsys.readouterr().err


# ---- the forecasts


def twelve_gib() -> Simulation:
    traces = {"device": Trace(events=(12 * GIB,), marks=((0, "backward"),))}
    return replace(simulate_peaks(1, init=GIB, backward=12 * GIB), traces=traces)


def test_a_cell_is_forecast_for_the_card_it_ran_on() -> None:
    row = cell(card_bytes=16 * GIB, ds_config={"zero_optimization": {"stage": 2}}, facts=asdict(FACTS))
    ask = gpu_forecasts.ask_of(row, "cuda", 79 * GIB)
    assert (ask.device_bytes, ask.rung, ask.checkpointing) == (16 * GIB, "ddp", True)
    whole = gpu_forecasts.ask_of({**row, "card_bytes": None}, "cuda", 79 * GIB)
    assert whole.device_bytes == 79 * GIB
    simulated = twelve_gib()
    emulated, real = (
        gpu_forecasts.said_of({**row, "card_bytes": card, "outcome": asdict(fit(peak_bytes=12 * GIB))}, one, simulated)
        for card, one in ((16 * GIB, ask), (None, whole))
    )
    assert emulated["verdict"] == "fits"
    constants_bytes = emulated["inside_bytes"] + emulated["beside_bytes"]
    assert emulated["at_limit_bytes"] - constants_bytes == pytest.approx(12 * GIB, rel=0.02)
    assert real["peak_bytes"] == emulated["peak_bytes"]  # a limit is the whole process's
    assert real["beside_bytes"] > 0
    assert real["at_limit_bytes"] == emulated["at_limit_bytes"]


def test_what_ran_out_is_forecast_by_what_it_would_have_needed() -> None:
    row = cell(card_bytes=8 * GIB, kind="out_of_memory", ds_config={}, facts=asdict(FACTS))
    ask = gpu_forecasts.ask_of(row, "cuda", 79 * GIB)
    said = gpu_forecasts.said_of(row, ask, twelve_gib())
    assert said["verdict"] == "cannot_fit"
    assert said["at_limit_bytes"] == said["peak_bytes"] > 12 * GIB


# ---- the constants


def measured_file(*residuals: int) -> dict[str, Any]:
    rows = [cell(measured=10 * GIB + size * MIB, micro_batch=place) for place, size in enumerate(residuals)]
    return file_of(*rows, context=[readings(1, 300, 520, 540), readings(2, 300, 520, 1120)])


def test_context_nccl_and_workspaces_come_from_the_readings() -> None:
    found = constants.fitted([measured_file(*range(0, 100, 10))], ["h100.json"])
    context, nccl, workspaces = found.rows
    assert (context.low, context.typical) == (520 * MIB, 520 * MIB)
    assert nccl.typical == 600 * MIB
    assert workspaces.typical == 85 * MIB  # the 40 MiB that the forecast has, and what was missing
    assert workspaces.low == 40 * MIB
    assert workspaces.high > 130 * MIB
    assert found.spread is not None
    assert found.spread < 0.01
    assert "NVIDIA H100 (driver 580.95, torch 2.11.0+cu130): h100.json" in workspaces.source


def test_a_trial_of_several_ranks_says_what_nccl_took_too() -> None:
    said = file_of(cell(world=2), context=[readings(1, 300, 520, 540)])
    assert constants.collectives(said) == [380 * MIB]


def test_too_few_readings_change_nothing_and_that_is_said() -> None:
    found = constants.fitted([file_of(cell())], ["x.json"])
    assert all(row.why for row in found.rows)
    assert found.spread is None
    shipped = (Path(__file__).parents[3] / "configs" / "forecast" / "constants.toml").read_text()
    assert constants.replaced(shipped, found) == shipped
    assert "NCCL: 0 readings, at least 1 are needed: left as it is" in constants.shown(found)


def test_a_forecast_that_says_too_much_makes_no_negative_workspace() -> None:
    found = constants.fitted([measured_file(*[-500] * 12)], ["x.json"])
    assert (found.rows[-1].low, found.rows[-1].typical) == (0, 0)
    assert found.spread is not None
    assert found.spread > 0.02


def test_the_whole_file_is_written_and_the_forecast_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "h100.json", tmp_path / "constants.toml"
    results.write(path, measured_file(*range(0, 100, 10)))
    assert constants.main([str(path), "--out", str(out)]) == 0
    rows = {row.name: row for row in read_overheads(out).constant}
    assert rows["CUDA context"].bytes == ("520MiB", "520MiB", "572MiB")
    assert rows["NCCL"].source.startswith("measured, 1 readings")
    before = {row.name: row for row in read_overheads().constant}
    kept = set(before) - {"CUDA context", "NCCL", "cuBLAS workspaces"}
    assert all(rows[name] == before[name] for name in kept)
    assert read_overheads(out).spread["cpu"] == read_overheads().spread["cpu"]
    assert "written" in capsys.readouterr().out


def test_cpu_ranks_teach_nothing_of_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cpu.json"
    results.write(path, {**file_of(cell()), "device": {"kind": "cpu", "name": "a CPU"}})
    assert constants.main([str(path)]) == 2
    assert "not measured on a card" in capsys.readouterr().err


# ---- questions


class ScriptedBench:
    """A bench whose trials hold 10 GiB of a card, 8 of them in use, beside the results that are known."""

    def __init__(self, known: dict[str, Any] | None = None) -> None:
        self.known, self.site = known or file_of(), SITE

    def run(self, rung: str, limit: int | None = None, **config: Any) -> dict[str, Any]:
        if limit is not None and limit < 8 * GIB:
            return {"kind": "out_of_memory", "tier": "device", "evidence": "CUDA"}
        return {"kind": "fit", "device": min(10 * GIB, limit or 10 * GIB), "device_in_use": 8 * GIB}


def test_context_and_nccl_are_held_against_the_forecasts_constants() -> None:
    usual, large = readings(1, 300, 450, 0), readings(1, 300, 5000, 0)
    assert gpu_questions.ask("beside", ScriptedBench(file_of(context=[usual])))["holds"] is True
    assert gpu_questions.ask("beside", ScriptedBench(file_of(context=[large])))["holds"] is False
    assert "not_asked" in gpu_questions.ask("beside", ScriptedBench())


def test_an_emulated_card_fits_its_trial_and_no_larger_one() -> None:
    answer = gpu_questions.ask("limit", ScriptedBench())
    assert answer["holds"] is True
    assert answer["tight"]["kind"] == "out_of_memory"


def test_a_question_that_fails_has_its_reason_and_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(bench: Any) -> Any:
        raise KeyError("fused")

    monkeypatch.setitem(gpu_questions.QUESTIONS, "adam", fail)
    answer = gpu_questions.ask("adam", ScriptedBench())
    assert (answer["holds"], answer["not_asked"]) == (None, "KeyError: 'fused'")
    assert gpu_questions.ask("overlap", ScriptedBench())["not_asked"] == "one rank sends nothing"
    assert results.shown_answer(answer) == "not answered: KeyError: 'fused'"


def test_every_question_is_explained_where_a_person_looks() -> None:
    explained = str(measure.__doc__)
    assert [name for name in gpu_questions.QUESTIONS if f"\n  {name} " not in explained] == []


@pytest.mark.parametrize(("capability", "suffix"), [([8, 0], ""), ([9, 0], " from Hopper on"), (None, "")])
def test_workspaces_are_those_of_the_measured_card(capability: list[int] | None, suffix: str) -> None:
    assert (
        constants.row_of("cuBLAS workspaces", [{"context": [{"capability": capability}, {}]}])
        == f"cuBLAS workspaces{suffix}"
    )
