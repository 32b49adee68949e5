"""Records as a journal holds them."""

from __future__ import annotations

from autods.types import Fit, Knobs, Outcome, Record, Steps, TierUse, Timing, Trial

TRIAL = Trial(
    rung="zero3",
    knobs=Knobs(micro_batch=4, accumulation=2, settings={"zero_optimization.overlap_comm": True, "aio.x": 0.1}),
    purpose="walk",
    steps=Steps(warmup=1, timed=3, most_timed=6),
)


FIT = Fit(
    memory={"device": TierUse(peak_bytes=400, limit_bytes=416), "host": TierUse(peak_bytes=900)},
    samples_per_second=12.5,
    tokens_per_second=None,
    step_s=(0.1, 0.2),
    spread=0.01,
    losses=(7.6, 7.5, 7.4),
    timing=Timing(wall_s=2.5, steps_s=0.3),
)


def record(outcome: Outcome = FIT, trial: Trial = TRIAL) -> Record:
    return Record(id=3, trial=trial, outcome=outcome, seconds=2.75)
