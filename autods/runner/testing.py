"""A runner for tests of the search: a function answers its trials, without Ray, ranks or memory."""

from __future__ import annotations

from collections.abc import Callable

from ..types import Action, Failed, FailureKind, Fit, Outcome, OutOfMemory, Record, Tier, TierUse, Timing, Trial

Answer = Callable[[Trial], Outcome]


class ScriptedRunner:
    """Answers each trial with `answer(trial)`; `trials` lists the trials in order."""

    def __init__(self, answer: Answer) -> None:
        self.trials: list[Trial] = []
        self._answer = answer

    def run(self, trial: Trial) -> Record:
        """Return the finished trial, numbered in the order of the calls."""
        self.trials.append(trial)
        return Record(id=len(self.trials), trial=trial, outcome=self._answer(trial), seconds=1.0)


def fit(
    *,
    peak_bytes: int,
    samples_per_second: float = 1.0,
    step_s: float = 0.1,
    limit_bytes: int | None = None,
    alloc_retries: int = 0,
) -> Fit:
    """The outcome of a trial that ran, with this device peak and speed."""
    return Fit(
        memory={"device": TierUse(peak_bytes=peak_bytes, limit_bytes=limit_bytes)},
        samples_per_second=samples_per_second,
        tokens_per_second=None,
        step_s=(step_s,),
        spread=0.0,
        losses=(1.0,),
        timing=Timing(wall_s=1.0),
        alloc_retries=alloc_retries,
    )


def out_of_memory(
    *, missing_bytes: int | None = None, tier: Tier = "device", action: Action = "leaner_rung"
) -> OutOfMemory:
    """The outcome of a trial that ran out of a tier. `missing_bytes` is the size of its last allocation."""
    return OutOfMemory(
        tier=tier,
        rank=0,
        phase="forward",
        evidence="RuntimeError: can't allocate memory",
        wanted_bytes=missing_bytes,
        free_bytes=0,
        action=action,
    )


def failed(
    *, failure: FailureKind = "unknown", action: Action = "retry", evidence: str = "exit code 3", op: str | None = None
) -> Failed:
    """The outcome of a trial that failed for another reason; by default one that is worth a second try."""
    return Failed(failure=failure, rank=0, phase="step", evidence=evidence, action=action, advice="", op=op)


def surface(
    *,
    limit_bytes: int,
    state_bytes: int,
    sample_bytes: int,
    floor_bytes: int = 0,
    step_overhead_s: float = 0.05,
    sample_s: float = 0.01,
    world_size: int = 2,
) -> Answer:
    """Answers with the memory and speed that real trials show.

    The peak is the larger one of the optimizer step (`floor_bytes`) and of forward and backward, which grows linearly
    with the micro batch. Above the limit the trial runs out. A step costs a fixed time and a time per sample.
    """

    def answer(trial: Trial) -> Outcome:
        knobs = trial.knobs
        peak = max(floor_bytes, state_bytes + sample_bytes * knobs.micro_batch)
        if trial.limited and peak > limit_bytes:
            return out_of_memory(missing_bytes=min(peak - limit_bytes, sample_bytes))
        step_s = knobs.accumulation * (step_overhead_s + sample_s * knobs.micro_batch)
        speed = knobs.train_batch(world_size) / step_s
        return fit(peak_bytes=peak, samples_per_second=speed, step_s=step_s, limit_bytes=limit_bytes)

    return answer
