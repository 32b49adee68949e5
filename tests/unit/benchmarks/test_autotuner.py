"""The pure parts of the benchmark beside DeepSpeed Autotuning: its bar, and how turns are compared."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import autotuner


def answer(name: str, seconds: float, micro_batch: int = 4, *, checkpointing: bool = False) -> autotuner.Answer:
    config = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": 2}
    return autotuner.Answer(
        name=name, ranks=1, seconds=seconds, cpu_s=1.0, tried=(), ds_config=config, checkpointing=checkpointing
    )


def side(*answers: autotuner.Answer, **turns: list[float]) -> autotuner.Side:
    found = autotuner.Side(size="gpt2_4x256", answers=[answer("autotuner", 150.0), *answers])
    found.turns = {name.replace("_", " "): list(rates) for name, rates in turns.items()}
    return found


def test_each_turn_is_compared_with_the_one_beside_it():
    assert autotuner.ratio([10.0, 30.0, 8.0], [5.0, 20.0, 4.0]) == 2.0  # the machine slowed down in between


def test_an_answer_that_is_late_or_slower_misses_the_bar():
    sooner = autotuner.summary(side(answer("autods quick", 10.0), autotuner=[5.0], autods_quick=[5.0]))
    late = autotuner.summary(side(answer("autods quick", 10.1), autotuner=[5.0], autods_quick=[5.0]))
    slower = autotuner.summary(side(answer("autods quick", 10.0), autotuner=[5.0], autods_quick=[4.9]))
    assert [autotuner.passes(rows) for rows in (sooner, late, slower)] == [True, False, False]


def test_an_answer_that_was_never_trained_passes_nothing():
    assert not autotuner.passes(autotuner.summary(side(answer("autods quick", 1.0), autotuner=[5.0])))


def test_the_bar_is_for_the_answer_as_it_was_given():
    given = answer("autods quick", 1.0, checkpointing=True)
    found = side(given, autotuner=[5.0], autods_quick=[4.0])
    found.turns["autods quick, not recomputing"] = [6.0]
    rows = autotuner.summary(found)
    assert [row["faster"] for row in rows] == [1.0, 0.8, 1.2]
    assert not autotuner.passes(rows)


def test_a_launch_is_read_after_a_progress_bar():
    line = (
        "  0%|          | 0/1 [00:00<?, ?it/s][2026-01-02 03:04:05,678] [INFO] [scheduler.py:381:run_experiment] "
        "Launching exp_id = 1, exp_name = z0_gas1_tmbspg1, with resource = localhost:0"
    )
    assert autotuner.LAUNCHED.findall(line) == [("2026-01-02 03:04:05,678", "Launching", "z0_gas1_tmbspg1")]
