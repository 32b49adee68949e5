"""A script's steps are timed without evaluation and saving; a parity trial records its samples and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autods.rank.comparable_losses import Incomparable
from autods.rank.distributed import Ranks
from autods.rank.memory import Meter
from autods.rank.script.policy import Policy
from autods.rank.script.trial_policy import ParityRecorder, StepClock, TrialPolicy
from autods.types import Exam, Steps
from autods.workload import WorkloadError
from tests.support.script_trials import Left, leave, script_job

ALONE = Ranks(rank=0, world_size=1)


class OneOfTwo(Ranks):
    def mean(self, value: float) -> float:
        return value / 2  # the other rank has 0


def test_a_step_includes_the_wait_for_its_data():
    clock = StepClock()
    clock.begin_forward(10.0)
    assert clock.end_step(11.0, boundary=True) == 1.0
    clock.begin_forward(13.0)  # the data took 2 s
    assert clock.end_step(14.0, boundary=True) == 3.0


def test_accumulated_micro_batches_are_one_step():
    clock = StepClock()
    for start in (0.0, 2.0, 4.0):
        clock.begin_forward(start)
        seconds = clock.end_step(start + 1.0, boundary=start == 4.0)
    assert seconds == 5.0


def test_an_evaluation_between_two_steps_does_not_count():
    clock = StepClock()
    clock.begin_forward(0.0)
    assert clock.end_step(1.0, boundary=True) == 1.0
    clock.interrupt()
    clock.begin_forward(51.0)
    assert clock.end_step(52.0, boundary=True) == 1.0


def test_an_evaluation_within_an_accumulation_does_not_count():
    clock = StepClock()
    clock.begin_forward(0.0)
    clock.end_step(1.0, boundary=False)
    clock.interrupt()
    clock.begin_forward(31.0)
    assert clock.end_step(32.0, boundary=True) == 2.0


def test_training_resumes_with_the_first_forward_after_a_pause():
    clock = StepClock()
    clock.begin_forward(0.0)
    assert clock.end_step(1.0, boundary=True) == 1.0
    clock.interrupt()
    clock.begin_forward(11.0)
    clock.begin_forward(12.0)
    assert clock.end_step(14.0, boundary=True) == pytest.approx(3.0)


def test_work_of_the_trial_itself_does_not_count():
    clock = StepClock()
    clock.begin_forward(0.0)
    assert clock.end_step(1.0, boundary=True) == 1.0
    clock.resume(101.0)
    clock.begin_forward(101.0)
    assert clock.end_step(102.0, boundary=True) == 1.0


def engine_of(*layers: torch.nn.Module) -> SimpleNamespace:
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD([*model.parameters(), torch.ones(1)])
    return SimpleNamespace(module=model, basic_optimizer=optimizer, clip_fp32_gradients=lambda: None)


def sample_mark(*batches: object, draws: bool = False) -> str | None:
    recorder = ParityRecorder(ALONE)
    for batch in batches:
        recorder.begin_forward((), {"batch": batch})
        if draws:
            torch.rand(1)
        recorder.end_forward()
    samples: str | None = recorder.describe().samples
    return samples


def test_samples_differ_by_values_shapes_and_order():
    ones, twos = torch.ones(4, 8), torch.full((4, 8), 2.0)
    assert sample_mark(ones, twos) == sample_mark(ones.clone(), twos.clone())
    others = (
        sample_mark(twos, ones),
        sample_mark(ones),
        sample_mark(ones.reshape(8, 4), twos),
        sample_mark(ones.to(torch.bfloat16), twos),
    )
    assert len({sample_mark(ones, twos), *others}) == 5


def test_samples_may_have_any_dtype():
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float64):
        assert sample_mark(torch.ones(3, dtype=dtype)) is not None
    assert sample_mark({"ids": [torch.ones(2)], "name": "x"}, torch.tensor(1.0), torch.empty(0)) is not None


def test_without_tensors_the_samples_are_unknown():
    assert sample_mark("text") is None


def test_random_numbers_that_a_forward_draws_are_samples():
    torch.manual_seed(1)
    first = sample_mark(torch.ones(1), draws=True)
    other = sample_mark(torch.ones(1), draws=True)
    torch.manual_seed(1)
    assert sample_mark(torch.ones(1), draws=True) == first != other
    assert sample_mark(torch.ones(1)) == sample_mark(torch.ones(1))  # the state alone says nothing


def test_partitioned_weights_add_up_without_padding():
    whole = torch.nn.Linear(5, 3, bias=False)
    recorder = ParityRecorder(ALONE)
    recorder.start(engine_of(whole))
    parts = []
    for rank in range(2):
        part = torch.full((8,), 1e9)
        mine = whole.weight.detach().reshape(-1)[8 * rank : 8 * rank + 8]
        part[: len(mine)] = mine
        part.ds_numel = 8
        held = torch.nn.Linear(5, 3, bias=False)
        held.weight.ds_tensor, held.weight.ds_numel = part, 15
        shared = ParityRecorder(OneOfTwo(rank=rank, world_size=2))
        shared.start(engine_of(held))
        parts.append(shared.weights)
    assert sum(parts) == pytest.approx(recorder.weights, rel=1e-12)


def test_weights_on_nvme_are_unknown():
    model = torch.nn.Linear(2, 2)
    model.weight.ds_tensor = SimpleNamespace(final_location="OffloadDeviceEnum.nvme")
    recorder = ParityRecorder(ALONE)
    recorder.start(engine_of(model))
    assert recorder.weights is None


def test_dropout_is_turned_off():
    dropout = torch.nn.Dropout(0.5)
    ParityRecorder(ALONE).start(engine_of(torch.nn.Linear(2, 2), dropout))
    assert dropout.p == 0


def test_mixtures_of_experts_are_not_compared():
    class MoE(torch.nn.Module):
        num_experts = 4

    with pytest.raises(Incomparable, match="an expert drops tokens"):
        ParityRecorder(ALONE).start(engine_of(MoE()))


def test_the_loss_of_a_step_is_the_mean_of_its_micro_batches():
    recorder = ParityRecorder(ALONE)
    means = []
    for losses in ((4.0, 2.0), (1.0, None, 2.0), (None,)):
        for loss in losses:
            recorder.add_loss(loss)
        means += recorder.end_step()
    assert means == [3.0, 1.5]


class Observer:
    """Has what a trial uses of `worker.Observer`."""

    def __init__(self) -> None:
        self.meter = Meter()

    def __call__(self, phase: str, step: int) -> None: ...

    touch = __call__


class Engine:
    """Its loss is the number of elements that it gets; it notes those of its evaluations."""

    def __init__(self) -> None:
        self.module, self.optimizer = torch.nn.Linear(1, 1), SimpleNamespace(overflow=False)
        self.evaluated: list[int] = []

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        self.evaluated.append(ids.numel())
        return torch.tensor(float(ids.numel()))

    def eval(self) -> None: ...

    train = eval

    def save_checkpoint(self, folder: str, tag: str) -> None:
        Path(folder).mkdir()

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str, dict[str, object]]:
        return folder, {}

    def zero_optimization_partition_weights(self) -> bool:
        return False


def test_an_exam_evaluates_the_same_batch_before_and_after(tmp_path: Path) -> None:
    job = script_job(exam="worst_case", micro_batch=1, shared=str(tmp_path), steps=Steps(warmup=0))
    trial = TrialPolicy(job, 0, Observer(), leave)
    trial.engine = engine = Engine()

    def train(*lengths: int) -> None:
        for length in lengths:
            trial.begin_forward((torch.ones(1, length, dtype=torch.long),), {}, training=True)
            trial.end_step(boundary=True)

    with pytest.raises(Left):
        train(5, 8, 9)  # the exam begins after the first step
    examined = trial.result().examined
    assert engine.evaluated == [5, 5]
    assert (examined.batch_shape, examined.draws, examined.restored) == ((1, 5), 1, True)


@pytest.mark.parametrize("exam", [None, "parity"])
def test_a_skipped_step_of_a_script_is_not_timed_and_has_no_loss(exam: Exam | None) -> None:
    trial, train = train_script(exam)
    with pytest.raises(Left):
        train((True, math.inf), (False, 1.0), (True, 2.0), (False, 3.0), (False, 4.0), (False, 5.0))
    result = trial.result()
    assert (len(result.step_s), result.losses, result.skipped_steps) == (3, (1.0, 3.0, 4.0), 2)


@pytest.mark.parametrize("exam", [None, "parity"])
def test_a_loss_of_a_script_that_is_not_finite_is_an_error(exam: Exam | None) -> None:
    _, train = train_script(exam)
    with pytest.raises(WorkloadError, match="the loss is nan at step 2"):
        train((False, 1.0), (False, math.nan))


def train_script(exam: Exam | None) -> tuple[TrialPolicy, Callable[..., None]]:
    """A trial of three timed steps; the function does steps, which are skipped or not, with these losses."""
    job = script_job(exam=exam, micro_batch=1, steps=Steps(warmup=0, timed=3, most_timed=3))
    trial = TrialPolicy(job, 0, Observer(), leave)
    trial.engine = engine = Engine()

    def train(*steps: tuple[bool, float]) -> None:
        for engine.optimizer.overflow, loss in steps:
            trial.begin_forward((torch.ones(1, 5),), {}, training=True)
            trial.note_loss(torch.tensor(loss))
            trial.end_step(boundary=True)

    return trial, train


def test_a_script_that_goes_on_after_a_failure_is_ended() -> None:
    trial, _ = train_script(None)
    with pytest.raises(RuntimeError), trial.watch_call():
        raise RuntimeError("out of memory")
    with pytest.raises(Left, match="out of memory"):
        trial.check_goes_on()


def test_a_script_that_trains_without_an_engine_is_refused() -> None:
    policy = Policy(script_job(), Observer())
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    policy.refuse_other_training()
    for _ in range(100):
        optimizer.step()
    with pytest.raises(WorkloadError, match="it has taken 100 optimizer steps without DeepSpeed"):
        optimizer.step()
    with pytest.raises(WorkloadError, match="it trains by torch's DistributedDataParallel, not by DeepSpeed"):
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    policy.start_training(Engine())
    optimizer.step()
