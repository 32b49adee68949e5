"""Optimizer steps are seen however a script takes them, and Ulysses is registered for the chosen micro batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autods.rank.script.adapters.deepspeed import (
    check_shared_sequences,
    destroy_process_group,
    load_checkpoint,
    register_ulysses,
    watch_engine,
)
from autods.rank.script.trial_policy import TrialPolicy
from autods.rank.training_run.run_policy import RunPolicy
from autods.workload import WorkloadError
from tests.support.run_jobs import run_job
from tests.support.script_trials import script_job


class Optimizer:
    steps = 0

    def step(self):
        self.steps += 1


class Engine:
    """Has what is watched of DeepSpeed's engine; it steps its optimizer at each boundary."""

    training, global_steps = True, 0

    def __init__(self, accumulation=1):
        self.optimizer, self.accumulation, self.done = Optimizer(), accumulation, 0
        self.is_stepping = False

    def forward(self, x):
        return x

    def backward(self, loss):
        return loss

    def train(self, mode=True):
        self.training = mode

    def save_checkpoint(self, folder):
        return True

    def is_gradient_accumulation_boundary(self):
        """As with managed_gradient_accumulation off: true inside of `step` alone."""
        return self.is_stepping

    def step(self):
        self.is_stepping = (self.done + 1) % self.accumulation == 0
        if self.is_gradient_accumulation_boundary():
            self.optimizer.step()
            self.global_steps += 1
        self.done, self.is_stepping = self.done + 1, False


class BoundaryPolicy(TrialPolicy):
    """Notes the boundaries only."""

    def __init__(self, job):
        super().__init__(job, slot=0, observer=lambda phase, step: None, leave=pytest.fail)
        self.boundaries = []

    def end_step(self, *, boundary):
        self._backwards = 0
        self.boundaries.append(boundary)


def watched(engine, **job):
    policy = BoundaryPolicy(script_job(**job))
    watch_engine(engine, policy)
    return policy


def test_an_engine_step_counts_once_though_it_steps_its_optimizer():
    engine = Engine(accumulation=2)
    policy = watched(engine)
    for _ in range(4):
        engine.step()
    assert policy.boundaries == [False, True, False, True]
    assert engine.optimizer.steps == 2


def test_a_step_of_the_optimizer_alone_counts():
    engine = Engine()
    policy = watched(engine)
    engine.optimizer.step()
    assert policy.boundaries == [True]
    assert engine.optimizer.steps == 1


def test_the_watched_optimizer_step_is_a_method():
    engine = Engine()
    watched(engine)
    assert engine.optimizer.step.__func__ is not Optimizer.step
    assert engine.optimizer.step.__self__ is engine.optimizer


def test_an_evaluation_of_a_pipeline_is_no_training():
    class Pipeline(Engine):
        def eval_batch(self, batches):
            return self.forward(batches)

    engine, phases = Pipeline(), []
    policy = watched(engine)
    policy.begin_other = phases.append
    policy.begin_forward = pytest.fail
    assert engine.eval_batch(3) == 3
    assert phases == ["evaluate"]


def test_a_script_that_never_steps_is_an_error():
    engine = Engine()
    watched(engine, accumulation=2)
    for _ in range(512):
        engine.backward(SimpleNamespace())
    with pytest.raises(WorkloadError, match="called the engine's backward 513 times and never its step"):
        engine.backward(SimpleNamespace())


def test_a_script_may_accumulate_by_itself():
    engine = Engine()
    policy = watched(engine)
    for _ in range(3):
        for _ in range(200):
            engine.backward(SimpleNamespace())
        engine.step()
    assert policy.boundaries == [True] * 3


def test_a_run_beats_while_its_script_evaluates_and_saves(tmp_path):
    phases = []
    observer = SimpleNamespace(touch=lambda phase, step: phases.append(phase))
    policy = RunPolicy(run_job(tmp_path, steps=None, checkpoint_every=1), observer)
    watch_engine(engine := Engine(), policy)
    engine.train(False)
    engine.forward(1)
    engine.save_checkpoint("folder")
    assert phases == ["evaluate", "evaluate", "save"]


@pytest.fixture
def events(monkeypatch):
    """What happens, in order, when a script of so many steps ends its process group, or a group of some ranks."""
    happened: list[object] = []

    def end_group(steps: int, *group: object) -> list[object]:
        policy = BoundaryPolicy(script_job(exam="worst_case"))
        policy.engine, policy.recorder.times = object(), [0.1] * steps
        destroy_process_group(policy, happened.append, *group)
        return happened

    monkeypatch.setattr(TrialPolicy, "finish_exam", lambda self: happened.append("exam"))
    return end_group


def test_an_exam_is_finished_before_the_process_group_ends(events):
    assert events(3) == ["exam", None]


def test_a_script_that_ended_too_early_has_no_exam(events):
    assert events(0) == [None]


def test_a_group_of_some_ranks_may_end_at_any_time(events):
    assert events(3, "some ranks") == ["some ranks"]


def register(model: str, core: str, ranks: int, micro_batch_size: int, seq_length: int | None = None) -> Any:
    return model, core, ranks, micro_batch_size, seq_length


@pytest.mark.parametrize("given", [("llama", "sdpa", 2, 1), ("llama", "sdpa", 2)])
def test_shared_sequences_have_the_chosen_micro_batch(given: tuple[Any, ...]) -> None:
    named = {} if len(given) == 4 else {"micro_batch_size": 1}
    assert register_ulysses(8, register, *given, **named, seq_length=256) == ("llama", "sdpa", 2, 8, 256)


def fail(error: Exception) -> Any:
    raise error


def test_ranks_that_share_sequences_by_an_mpu_alone_are_an_error() -> None:
    """As with accelerate's ParallelismConfig(sp_size=2), whose config says nothing of it."""
    mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    check_shared_sequences(mpu, {"sequence_parallel_size": 2})
    with pytest.raises(WorkloadError, match=r"2 ranks share each sequence, .* sequence_parallel_size 1") as caught:
        check_shared_sequences(mpu, {})
    assert '"sequence_parallel_size": 2' in str(caught.value)
    check_shared_sequences(SimpleNamespace(get_data_parallel_world_size=lambda: 1), {})  # Megatron's splits layers
    check_shared_sequences(None, {})


def test_a_checkpoint_of_another_stage_is_explained() -> None:
    phases: list[str] = []
    policy: Any = SimpleNamespace(begin_other=phases.append)
    assert load_checkpoint(policy, lambda folder: (folder, {}), "saved") == ("saved", {})
    with pytest.raises(WorkloadError, match=r"AttributeError: no copy.*another ZeRO stage") as caught:
        load_checkpoint(policy, lambda folder: fail(AttributeError("no copy")), "saved")
    assert "--ladder" in caught.value.hint
    with pytest.raises(RuntimeError, match="out of memory"):
        load_checkpoint(policy, lambda folder: fail(RuntimeError("out of memory")), "saved")
    assert phases == ["load"] * 3
