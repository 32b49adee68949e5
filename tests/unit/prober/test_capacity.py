"""The largest micro batch: from the forecast to a boundary that trials have shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autods.forecast.simulate import SimulationFailed
from autods.forecast.testing import ScriptedSimulator, simulate_peaks
from autods.forecast.values import EngineSpec, Simulation
from autods.prober.capacity import MOST_TRIALS
from autods.prober.probe_settings import ProbeSettings
from autods.report.results.probe import CellResult
from autods.runner.testing import failed, surface
from autods.types import Outcome, Trial, WorkloadSource
from tests.support.probes import FACTS, LIMIT, MIB, Bench, ask, probed

Script = Callable[[EngineSpec, int], Simulation]


def simulating(sample_mib: float, state_mib: float = 100) -> Script:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        return simulate_peaks(
            micro_batch, init=int(state_mib * MIB), backward=int((state_mib + sample_mib * micro_batch) * MIB)
        )

    return script


def searched(
    question: ProbeSettings, script: Script, *, sample_mib: float = 20, state_mib: float = 100
) -> tuple[CellResult, list[int]]:
    """The only cell, on a machine whose memory is a line, and the micro batches that were tried."""
    answer = surface(limit_bytes=LIMIT, state_bytes=int(state_mib * MIB), sample_bytes=int(sample_mib * MIB))
    bench = Bench(answer)
    report = probed(question, bench, simulate=started(script))
    return report.cells[0], [trial.knobs.micro_batch for trial in bench.asked]


def started(script: Script) -> Callable[[WorkloadSource], ScriptedSimulator]:
    class Started(ScriptedSimulator):
        def __enter__(self) -> Started:
            return self

        def __exit__(self, *raised: object) -> None:
            return None

    return lambda source: Started(FACTS, script)


# The forecast of CPU ranks adds what was measured of such ranks: it says about 15, as the machine does.
NEARLY_RIGHT = simulating(20)


def test_a_nearly_right_forecast_costs_few_trials(tmp_path: Path) -> None:
    cell, tried = searched(ask(tmp_path, "rung=zero1", capacity=True), NEARLY_RIGHT)
    assert cell.capacity is not None
    assert (cell.capacity.verified, cell.capacity.refused, cell.capacity.exact) == (15, 16, True)
    assert set(tried) >= {15, 16}
    assert len(tried) <= 5
    assert tried[0] == cell.capacity.forecast
    assert cell.micro_batch == 15


@pytest.mark.parametrize("sample_mib", [0.5, 3, 8, 40, 150])
@pytest.mark.parametrize("said_mib", [1, 20, 300])
def test_a_wrong_forecast_does_not_hide_the_boundary(tmp_path: Path, sample_mib: float, said_mib: float) -> None:
    question = ask(tmp_path, "rung=zero1", capacity=True)
    cell, tried = searched(question, simulating(said_mib), sample_mib=sample_mib)
    right = int((LIMIT / MIB - 100) / sample_mib)
    assert cell.capacity is not None
    assert (cell.capacity.verified, cell.capacity.refused) == (right, right + 1)
    assert cell.capacity.exact
    assert len(tried) == len(set(tried)) <= MOST_TRIALS


def test_without_a_forecast_it_grows_from_one(tmp_path: Path) -> None:
    cell, tried = searched(ask(tmp_path, "rung=zero1", capacity=True, forecast=False), NEARLY_RIGHT)
    assert cell.capacity is not None
    assert tried[0] == 1
    assert (cell.capacity.forecast, cell.capacity.verified, cell.capacity.refused) == (None, 15, 16)


def test_the_result_says_what_is_missing_for_micro_batch_1(tmp_path: Path) -> None:
    cell, tried = searched(ask(tmp_path, "rung=zero1", capacity=True), simulating(20, 900), state_mib=500)
    assert cell.status == "out_of_memory"
    assert cell.capacity is not None
    assert cell.capacity.verified is None
    assert "not even micro batch 1 fits: device lacks" in cell.capacity.explanation
    assert tried == [1]


def test_a_global_batch_leaves_only_its_divisors(tmp_path: Path) -> None:
    cell, _ = searched(ask(tmp_path, "rung=zero1", capacity=True, global_batch=48), NEARLY_RIGHT)
    assert cell.capacity is not None
    assert (cell.capacity.verified, cell.capacity.refused, cell.capacity.exact) == (12, 24, True)
    assert cell.accumulation == 2


def test_the_result_says_whether_the_forecast_was_too_low(tmp_path: Path) -> None:
    careful, _ = searched(ask(tmp_path / "", "rung=zero1", capacity=True), simulating(30))
    bold, _ = searched(ask(tmp_path, "rung=zero1", capacity=True), simulating(10), sample_mib=20)
    assert careful.capacity is not None
    assert bold.capacity is not None
    assert "was too low" in careful.capacity.explanation


def test_a_failure_that_is_not_of_memory_ends_the_search_of_its_cell(tmp_path: Path) -> None:
    def answer(trial: Trial) -> Outcome:
        if trial.rung == "zero1":
            return failed(failure="config", action="fix_config", evidence="ValueError: no")
        return surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=20 * MIB)(trial)

    bench = Bench(answer)
    report = probed(ask(tmp_path, "rung=zero1,zero2", capacity=True), bench, simulate=started(NEARLY_RIGHT))
    assert [cell.status for cell in report.cells] == ["failed", "fit"]
    assert sum(trial.rung == "zero1" for trial in bench.asked) == 1


def test_a_forecast_alone_runs_no_trial(tmp_path: Path) -> None:
    question = ask(tmp_path, "rung=zero1,zero3", gpus="2,4", forecast_only=True)
    bench = Bench(lambda trial: pytest.fail("a trial was run"))
    report = probed(question, bench, simulate=started(NEARLY_RIGHT))
    assert len(report.cells) == 4
    assert bench.surveyed == []
    for cell in report.cells:
        assert cell.capacity is not None
        assert cell.capacity.verified is None
        assert cell.micro_batch == cell.capacity.forecast is not None


def test_a_cell_that_cannot_be_simulated_is_tried(tmp_path: Path) -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        raise SimulationFailed(kind="unsupported", problem="no fake implementation of my_op")

    cell, tried = searched(ask(tmp_path, "rung=zero1", capacity=True), script)
    assert cell.capacity is not None
    assert (cell.capacity.forecast, cell.capacity.verified) == (None, 15)
    assert tried[0] == 1
    alone = probed(
        ask(tmp_path, "rung=zero1", forecast_only=True), Bench(lambda t: failed()), simulate=started(script), fresh=True
    )
    assert alone.cells[0].status == "failed"
    assert "my_op" in alone.cells[0].reason
    assert alone.status == "nothing_fits"


def test_forecasts_are_journaled_with_the_trials(tmp_path: Path) -> None:
    question = ask(tmp_path, "rung=zero1,zero2", capacity=True)
    searched(question, NEARLY_RIGHT)

    def never(source: WorkloadSource) -> ScriptedSimulator:
        raise AssertionError("something was simulated again")

    again = probed(question, Bench(lambda trial: pytest.fail("a trial was run again")), simulate=never)
    assert [cell.capacity.verified for cell in again.cells if cell.capacity] == [15, 15]


def test_a_forecast_ends_before_a_batch_that_cannot_be_simulated(tmp_path: Path) -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        if micro_batch > 5:
            raise SimulationFailed(kind="user_code", problem="its data ends")
        return NEARLY_RIGHT(ask, micro_batch)

    bench = Bench(lambda trial: pytest.fail("a trial was run"))
    report = probed(ask(tmp_path, "rung=zero1", forecast_only=True), bench, simulate=started(script))
    assert report.cells[0].micro_batch == 5
    assert "its data ends" in report.cells[0].reason
