"""The search for the micro batch that holds on the longest batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from autods.runner.testing import fit, out_of_memory
from autods.tuner.batch_curve import MemoryLine
from autods.tuner.certify import CertifyResult, usual_memory_line
from autods.types import Knobs, Outcome, Record, Trial
from tests.support.certificates import LIMIT, MIB, certifying, passes, trial

USABLE = 950 * MIB


@dataclass(frozen=True)
class Model:
    """Its memory: state, and of a sample linear layers and attention that is written out, on a usual text."""

    state: int
    linear: float
    square: float = 0.0
    longer: float = 8.0
    tells: bool = True  # what an allocation lacked

    def peak(self, micro_batch: int, *, longest: bool) -> int:
        times = self.longer if longest else 1.0
        return int(self.state + micro_batch * (self.linear * times + self.square * times**2))

    def holds(self, *, longest: bool) -> int:
        """The largest micro batch that leaves the headroom."""
        each = self.peak(1, longest=longest) - self.state
        return int((USABLE - self.state) / each)

    def __call__(self, asked: Trial) -> Outcome:
        longest = asked.exam == "worst_case"
        peak = self.peak(asked.knobs.micro_batch, longest=longest)
        if peak > LIMIT:
            lacking = int(self.peak(1, longest=longest) - self.state) // 4 + MIB  # one tensor of a layer
            return out_of_memory(missing_bytes=lacking if self.tells else None)
        return passes(asked, peak)


def certified_by(
    answer: Callable[[Trial], Outcome], sizes: Sequence[int], *, longest_ratio: float, most_trials: int = 8
) -> tuple[CertifyResult, list[int]]:
    """The last of `sizes` is the winner's, the others were tried before; losses are compared with another rung's."""
    *before, winner = (known(trial("zero1", size), answer) for size in sizes)
    reference = known(trial("ddp", 1), answer)
    run = certifying(
        answer, winner, alternates=before, reference=reference, most_trials=most_trials, longest_ratio=longest_ratio
    )
    return run.certified, [size for _, size in run.exams]


def known(asked: Trial, answer: Callable[[Trial], Outcome]) -> Record:
    return Record(id=asked.knobs.micro_batch, trial=asked, outcome=answer(asked), seconds=1.0)


def test_the_first_step_down_scales_by_the_longest_batch() -> None:
    model = Model(state=150 * MIB, linear=13 * MIB)  # 61 of the usual texts fit, 7 of the longest
    result, exams = certified_by(model, (1, 30, 59), longest_ratio=8.0)
    assert exams == [59, 7]
    assert result.certificate.passed
    assert result.best.trial.knobs.micro_batch == 7


def test_without_a_memory_line_the_length_ratio_decides() -> None:
    model = Model(state=0, linear=13 * MIB)
    _, exams = certified_by(model, (59,), longest_ratio=8.0)
    assert exams[:2] == [59, 7]


def test_quadratic_attention_needs_a_further_step() -> None:
    model = Model(state=50 * MIB, linear=10 * MIB, square=5 * MIB)  # the square of eight times the length
    assert model.holds(longest=True) == 2
    result, exams = certified_by(model, (1, 30, 59), longest_ratio=8.0)
    assert exams == [59, 7, 1, 2]
    assert result.certificate.passed
    assert result.certificate.parity is not None


def test_an_unknown_length_is_found_in_few_exams() -> None:
    model = Model(state=150 * MIB, linear=13 * MIB, tells=False)
    result, exams = certified_by(model, (1, 30, 59), longest_ratio=1.0)
    assert exams == [59, 29, 7]
    longer = replace(model, linear=2.0 * MIB, longer=16.0)  # 25 of the longest fit
    result, exams = certified_by(longer, (1, 64, 200), longest_ratio=1.0)
    assert exams == [200, 100, 25]
    assert result.certificate.passed
    between = replace(model, linear=1.0 * MIB, longer=8.0)  # 100 fit; 3/4 of the way between two steps
    result, exams = certified_by(between, (1, 200, 799), longest_ratio=1.0)
    assert exams == [799, 399, 99]
    assert result.certificate.passed


# Attention's share of what linear layers take on the usual text: none, little, as much.
MODELS = [
    Model(state=state * MIB, linear=4 * MIB, square=4 * MIB * share, longer=longer, tells=False)
    for longer in (1.2, 1.5, 2.0, 4.0, 8.0, 32.0)
    for share in (0.0, 0.02, 0.2, 1.0)
    for state in (20, 400)
]


@pytest.mark.parametrize("model", [model for model in MODELS if model.holds(longest=True)])
@pytest.mark.parametrize("told", [True, False])
def test_a_holding_size_is_found_within_the_trials(model: Model, told: bool) -> None:
    most, holds, longer = model.holds(longest=False), model.holds(longest=True), model.longer
    result, exams = certified_by(model, (1, most // 2, most), longest_ratio=longer if told else 1.0)
    assert result.certificate.passed
    assert result.certificate.parity is not None
    size = result.best.trial.knobs.micro_batch
    # Exams may fill the headroom, too: they only have to fit.
    assert holds * 0.8 - 1 <= size, (exams, holds)
    assert len(exams) <= 5


def test_larger_sizes_are_examined_while_trials_are_left() -> None:
    model = Model(state=100 * MIB, linear=10 * MIB, longer=5.0, tells=False)  # 17 of the longest hold
    exams = certified_by(model, (1, 42, 85), longest_ratio=1.0)[1]
    assert exams == [85, 42, 10, 17]
    assert certified_by(model, (1, 42, 85), longest_ratio=1.0, most_trials=6)[1] == [85, 42, 10]


def test_after_one_failure_upwards_the_middle_is_examined() -> None:
    """What a larger batch needs at once bends the line: after it ran short, the middle is tried."""

    def answer(asked: Trial) -> Outcome:
        size = asked.knobs.micro_batch
        if asked.exam == "worst_case" and size > 13:
            return out_of_memory()
        peak = 10 * MIB * size + 100 * MIB
        return passes(asked, peak)

    assert certified_by(answer, (1, 40, 80), longest_ratio=1.0, most_trials=7)[1] == [80, 40, 10, 39]
    result, exams = certified_by(answer, (1, 40, 80), longest_ratio=1.0)
    assert exams == [80, 40, 10, 39, 19]
    assert result.best.trial.knobs.micro_batch == 10
    assert result.certificate.passed


def test_a_memory_line_needs_usual_batches_of_the_same_config() -> None:
    records = [
        Record(id=size, trial=trial("zero1", size), outcome=fit(peak_bytes=100 * (1 + size)), seconds=1.0)
        for size in (1, 4)
    ]
    first = records[0]
    others = [
        replace(first, trial=trial("zero3", 8)),
        replace(first, trial=replace(trial("zero1", 8), exam="worst_case")),
        replace(first, trial=replace(trial("zero1", 8), knobs=Knobs(micro_batch=8, checkpointing=True))),
        replace(first, trial=trial("zero1", 16), outcome=out_of_memory()),
    ]
    assert usual_memory_line(trial("zero1", 2), [*records, *others]) == MemoryLine(fixed_bytes=100, bytes_each=100)
    assert usual_memory_line(trial("zero1", 2), [first, *others]) is None


def test_a_flat_peak_makes_no_memory_line() -> None:
    flat = [
        Record(id=size, trial=trial("zero1", size), outcome=fit(peak_bytes=600 * MIB), seconds=1.0) for size in (1, 14)
    ]
    assert usual_memory_line(trial("zero1", 14), flat) is None

    def answer(asked: Trial) -> Outcome:
        short = asked.exam == "worst_case" and asked.knobs.micro_batch > 1
        return out_of_memory() if short else passes(asked, 600 * MIB)

    assert certified_by(answer, (1, 14), longest_ratio=8.0)[1] == [14, 1]
