from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace

import pytest
import torch

from autods.rank.training_run.checkpoints import list_checkpoints
from autods.rank.training_run.session import NoObserver, Session, Stopped, find_engine
from autods.workload.protocol import WorkloadError
from tests.support.run_jobs import run_job


class Engine:
    """What a session uses of DeepSpeed's engine, without its ranks. `failure` is what a save raises half-way."""

    world_size, device, data_parallel_group, lr_scheduler = 1, torch.device("cpu"), None, None
    _config = SimpleNamespace(_param_dict={}, world_size=1)

    def __init__(self):
        self.global_steps, self.failure = 0, None
        self.module = torch.nn.Linear(2, 2)
        self.optimizer = self.basic_optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}

    def train_micro_batch_size_per_gpu(self):
        return 2

    def gradient_accumulation_steps(self):
        return 2

    def zero_optimization_stage(self):
        return 0

    def save_checkpoint(self, folder, tag, save_latest):
        with open(f"{folder}/weights.pt", "wb") as file:
            file.write(b"w" * 1000)
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def make_session(tmp_path):
    def make(**changes):
        values = {"steps": 6, "checkpoint_every": 2, "micro_batch": 2} | changes
        job = run_job(tmp_path, accumulation=2, **values)
        job.write()
        return Session(Engine(), job, NoObserver())

    return make


def train(session, steps):
    """Do optimizer steps of two micro batches; the loss of each is the step's number."""
    for _ in range(steps):
        session.step_done(torch.tensor(float(session.step + 1)))
        session.engine.global_steps += 1
        session.step_done(torch.tensor(float(session.step)))


def read_lines(session):
    return [json.loads(line) for line in session.order.steps_file.read_text().splitlines()]


def saved_steps(session):
    return [checkpoint.step for checkpoint in list_checkpoints(session.order.checkpoints).complete]


def test_steps_are_journaled_in_order_with_their_loss(make_session):
    session = make_session()
    train(session, 6)
    assert [(line["step"], line["loss"]) for line in read_lines(session)] == [(step, step) for step in range(1, 7)]
    assert saved_steps(session) == [4, 6]


def test_a_loss_that_is_no_number_is_journaled_as_null(make_session):
    session = make_session()
    for loss in ("inf", "nan", "-inf", "1"):
        for _ in range(2):
            session.engine.global_steps += _
            session.step_done(torch.tensor(float(loss)))
    session.consensus.flush()
    assert [line["loss"] for line in read_lines(session)] == [None, None, None, 1.0]


def test_the_last_step_is_saved_where_no_save_was_due(make_session):
    session = make_session(steps=None, checkpoint_every=4)
    train(session, 5)
    session.finish()
    assert saved_steps(session) == [4, 5]
    assert len(read_lines(session)) == 5


def test_a_full_disk_skips_the_save_and_training_goes_on(make_session, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    session = make_session()
    train(session, 3)
    assert saved_steps(session) == []
    assert [line["step"] for line in read_lines(session) if "unsaved" in line] == [2]


def test_lines_of_steps_wait_for_room_on_the_disk(make_session, monkeypatch):
    session, write = make_session(), os.write

    def refuse(file, data):
        if file == session._lines._file:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    train(session, 2)
    monkeypatch.setattr("os.write", refuse)
    train(session, 2)
    assert [line["step"] for line in read_lines(session)] == [1, 2]
    monkeypatch.setattr("os.write", lambda file, data: write(file, data[:7]))  # and then it takes a few bytes at once
    train(session, 2)
    assert [line["step"] for line in read_lines(session)] == [1, 2, 3, 4, 5, 6]


def test_an_older_checkpoint_makes_room_and_the_last_stays(make_session, monkeypatch):
    session = make_session()
    train(session, 4)
    usage = SimpleNamespace(free=10)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    train(session, 2)
    assert saved_steps(session) == [4]


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing")]
)
def test_a_save_that_fails_half_way_ends_the_rank_with_a_torn_folder(make_session, failure):
    session = make_session()
    train(session, 2)
    session.engine.failure = failure
    with pytest.raises(OSError, match="No space left") as raised:
        train(session, 2)
    assert raised.value.errno == errno.ENOSPC
    assert saved_steps(session) == [2]
    assert len(list_checkpoints(session.order.checkpoints).torn) == 1


def test_a_request_to_stop_saves_the_step_and_ends(make_session):
    session = make_session(steps=100, checkpoint_every=50)
    train(session, 1)
    session.order.stop_file.touch()
    with pytest.raises(Stopped):
        train(session, 10)
    assert session.step <= 4
    assert saved_steps(session) == [session.step]
    assert session.stopped


def test_an_engine_of_another_batch_is_refused(make_session):
    with pytest.raises(WorkloadError, match="4 samples a step, not 8"):
        make_session(micro_batch=4)


def test_without_a_run_batches_are_one_pass(monkeypatch):
    session = Session(Engine(), None, NoObserver())
    batches = []
    for batch in session.batches(list(range(11))):
        batches.append(batch.tolist())
        session.engine.global_steps += len(batches) % 2 == 0
        session.step_done()
    assert len(batches) == 4
    assert len({number for batch in batches for number in batch}) == 8


def test_a_loop_over_epochs_is_told_to_ask_once(make_session):
    session = make_session(steps=None)
    for _ in session.batches(list(range(8))):
        train(session, 1)
    with pytest.raises(WorkloadError, match="nothing to deal out: its samples end at step 2") as caught:
        next(session.batches(list(range(8))))
    assert "epochs=" in caught.value.hint


def test_batches_behind_the_last_step_are_none(make_session):
    session = make_session(steps=2)
    for _ in range(2):
        for _ in session.batches(list(range(4))):
            train(session, 1)
    assert session.step == 2


def test_ranks_that_load_their_data_have_no_workers(make_session, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    options = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 2}
    batches = make_session(loads_in_ranks=True).batches(list(range(8)), **options)
    assert len(next(batches)) == 2
    with pytest.raises(AssertionError, match="a worker was started"):
        next(make_session().batches(list(range(8)), **options))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(24))


@pytest.mark.parametrize("dataset", [list(range(24)), Stream()], ids=["of a known length", "a stream"])
def test_dealing_out_leaves_the_random_generator_alone(make_session, dataset):
    session = make_session()
    before = torch.get_rng_state()  # a run that goes on begins to deal out once more
    assert len(next(session.batches(dataset))) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_takes_no_size_of_its_own(make_session):
    with pytest.raises(WorkloadError, match="takes no batch_size"):
        next(make_session().batches([1, 2, 3, 4], batch_size=2))


def wrap_as_module(engine, name):
    """A module that keeps the engine under this name."""
    wrapper = torch.nn.Module()
    object.__setattr__(wrapper, name, engine)
    return wrapper


@pytest.mark.parametrize("name", ["engine", "_forward_module", "_orig_mod"])
def test_a_session_takes_what_a_library_has_wrapped(name):
    engine = Engine()
    assert find_engine(engine) is engine
    assert find_engine(wrap_as_module(wrap_as_module(engine, "_orig_mod"), name)) is engine


def test_a_model_without_an_engine_has_no_session():
    with pytest.raises(WorkloadError, match="session got Linear, which is no engine of DeepSpeed"):
        find_engine(torch.nn.Linear(2, 2))
