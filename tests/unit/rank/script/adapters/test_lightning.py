"""Lightning: its arguments about GPUs mean CPU ranks, and its loader deals out whole steps."""

from __future__ import annotations

import contextlib
import functools
import warnings
from types import SimpleNamespace

import lightning
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from autods.rank.script.adapters.lightning import (
    LightningLoop,
    RankSamples,
    divide_once,
    fit_from_start,
    rescale_batches,
    step_engine,
    use_cpu_ranks,
    warn_of_micro_batch_counts,
)
from autods.rank.training_run.samples import WholeSteps


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({"accelerator": "gpu", "devices": 2}, {"accelerator": "cpu", "devices": 2}),
        ({"accelerator": "cuda", "devices": -1}, {"accelerator": "cpu", "devices": 4}),
        ({"accelerator": "auto", "devices": [0, 1]}, {"accelerator": "auto", "devices": 2}),
        ({"max_epochs": 3}, {"max_epochs": 3}),
    ],
)
def test_devices_count_ranks(monkeypatch, given, passed):
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments, stand_ins = {}, []
    use_cpu_ranks(stand_ins, lambda self, **kwargs: arguments.update(kwargs), None, **given)
    assert arguments == passed
    assert len(stand_ins) == (given.get("accelerator") in ("gpu", "cuda"))


def deal(ranks: int, micro_batch: int, *, trained: int = 0) -> list[list[list[int]]]:
    """The micro batches of an epoch of 20 samples on each rank, in steps of 8, behind those that it has trained on."""
    dealt = []
    for rank in range(ranks):
        samples = WholeSteps(SequentialSampler(range(20)), global_batch=8, drop_last=False, seed=0)
        sampler = RankSamples(samples, micro_batch=micro_batch, rank=rank, ranks=ranks, trained=trained)
        assert len(sampler) == 24 // ranks
        dealt.append(list(BatchSampler(sampler, micro_batch, drop_last=False)))
    return dealt


@pytest.mark.parametrize(("ranks", "micro_batch"), [(1, 4), (2, 4), (2, 2), (4, 1)])
def test_each_step_has_the_same_samples_on_any_division(ranks, micro_batch):
    accumulation = 8 // (ranks * micro_batch)
    for step, expected in enumerate(([*range(8)], [*range(8, 16)], [*range(16, 20), *range(4)])):
        batches = [rank[step * accumulation : (step + 1) * accumulation] for rank in deal(ranks, micro_batch)]
        assert sorted(sample for rank in batches for batch in rank for sample in batch) == sorted(expected)


def test_a_resumed_epoch_begins_behind_what_was_trained():
    assert deal(2, 2, trained=4) == [rank[4:] for rank in deal(2, 2)]


def test_the_next_epoch_begins_at_its_begin():
    samples = WholeSteps(SequentialSampler(range(8)), global_batch=8, drop_last=False, seed=0)
    sampler = RankSamples(samples, micro_batch=2, rank=0, ranks=1, first_epoch=3, trained=3)
    assert list(sampler) == [6, 7]
    sampler.set_epoch(4)
    assert list(sampler) == list(range(8))


def test_progress_counts_the_micro_batches_of_another_accumulation():
    counts = {"ready": 8, "started": 8, "processed": 8, "completed": 8}
    fit_loop = {"epoch_loop.batch_progress": {"total": dict(counts), "current": dict(counts)}}
    rescale_batches(fit_loop, 2, 4)
    expected = {"ready": 16, "started": 16, "processed": 16, "completed": 16}
    assert fit_loop["epoch_loop.batch_progress"] == {"total": expected, "current": expected}


def test_the_loss_is_divided_by_the_accumulation_once():
    given = []
    for automatic in (True, False):
        divide_once(
            lambda *args, **kwargs: given.append(kwargs), None, 1.0, SimpleNamespace(automatic_optimization=automatic)
        )
    assert given == [{"scale_wrt_gas": False}, {}]


def test_a_trial_resumes_no_checkpoint():
    def fit(trainer, model, loader=None, ckpt_path=None, weights_only=None):
        return model, loader, ckpt_path

    start = functools.partial(fit_from_start, [], fit, SimpleNamespace(limit_train_batches=1.0, val_check_interval=1.0))
    assert start("model", loader="loader", ckpt_path="last") == ("model", "loader", None)
    assert start("model", "loader", "last.ckpt", True) == ("model", "loader", None)


def test_a_fit_is_told_of_lengths_in_micro_batches():
    told = []
    trainer = SimpleNamespace(limit_train_batches=10, val_check_interval=0.5)
    fit_from_start(told, lambda trainer: None, trainer)
    assert told == warn_of_micro_batch_counts(trainer)


def test_lengths_that_depend_on_the_micro_batch_are_found():
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    assert warn_of_micro_batch_counts(lightning.Trainer(**quiet)) == []
    given = {"limit_train_batches": 10, "val_check_interval": 0.5}
    (warning,) = warn_of_micro_batch_counts(lightning.Trainer(**quiet, **given))
    assert warning.startswith("its Trainer's limit_train_batches=10 count micro batches")


def test_fabric_steps_the_engine():
    stepped, engine = [], object()
    step_engine(lambda strategy, optimizer: stepped.append(optimizer), SimpleNamespace(model=engine), "optimizer")
    step_engine(lambda strategy, optimizer: stepped.append(optimizer), SimpleNamespace(model=None), "optimizer")
    assert stepped == [engine, "optimizer"]


# A resumed training.


@pytest.mark.parametrize("done", [True, False])
def test_a_run_that_was_saved_at_its_end_trains_no_further(done):
    session = SimpleNamespace(done=done, restore_random_states=lambda: True)
    loop = LightningLoop(SimpleNamespace(session=session), None, "lightning.pytorch")
    batches = SimpleNamespace(max_steps=-1)
    loop.trainer = SimpleNamespace(should_stop=False, global_step=6, fit_loop=SimpleNamespace(epoch_loop=batches))
    loop.begin(lambda strategy: None, None)
    assert (loop.trainer.should_stop, batches.max_steps) == ((True, 6) if done else (False, -1))


class Saved(BaseException):
    """The run has saved a checkpoint, and its process ends."""


class FakeHost:
    """A run that saves after one step, and ends there. It is its own session."""

    def __init__(self, loop_of, save_at, file):
        self.loop_of, self.save_at, self.file, self.session = loop_of, save_at, file, self

    def restore_random_states(self):
        pass

    report_step = finish = restore_random_states

    def order_samples(self, sampler, *, drop_last, seed):
        return WholeSteps(sampler, global_batch=4, drop_last=drop_last, seed=seed)

    def end_loop_step(self):
        loop = self.loop_of()
        if loop.trainer.global_step == self.save_at:
            loop.trainer.save_checkpoint(self.file)
            torch.save({**torch.load(self.file, weights_only=False), "metrics": loop.read_metrics()}, self.file)
            raise Saved


class Small(lightning.LightningModule):
    """Notes what a script's hooks see, by optimizer step. Its schedule halves the rate after each validation."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def note(self, event, *details):
        self.seen.append((self.global_step, event, self.current_epoch, *details))

    def training_step(self, batch, index):
        self.note("train", index, batch.flatten().tolist(), self.optimizers().param_groups[0]["lr"])
        return self.layer(batch).sum()

    def on_train_batch_end(self, *args):
        self.note("batch ends")

    def validation_step(self, batch, index):
        if not self.trainer.sanity_checking:
            self.note("validate", self.trainer.fit_loop.epoch_loop._batches_that_stepped)
            self.log("worse", float(self.global_step))

    def on_train_epoch_end(self):
        self.note("epoch ends")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "worse"}}


def train(monkeypatch, file, options, *, save_at=None, resumes=False):
    """Train 16 samples in steps of two micro batches of two, and return what the hooks have seen."""
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=2, num_sanity_val_steps=1, **options,
    )  # fmt: skip
    job = SimpleNamespace(micro_batch=2, accumulation=2)
    loop = LightningLoop(FakeHost(lambda: loop, save_at, file), job, "lightning.pytorch")
    loop.trainer, module = trainer, Small()
    trainer.callbacks.insert(0, loop._make_callback())
    if resumes:
        loop.go_on_from(torch.load(file, weights_only=False))
    data = torch.arange(16.0).reshape(16, 1)
    with monkeypatch.context() as patched:
        for owner, name, wrapper in (
            (type(trainer.fit_loop.epoch_loop), "reset", loop.begin_epoch),
            (type(trainer.fit_loop.epoch_loop), "on_advance_end", loop.end_batch),
            (type(trainer.fit_loop), "on_advance_end", loop.end_epoch),
            (type(trainer._data_connector), "_prepare_dataloader", loop.deal_samples),
        ):
            patched.setattr(owner, name, functools.partialmethod(call_wrapper, wrapper, getattr(owner, name)))
        ends = pytest.raises(Saved) if save_at else contextlib.nullcontext()
        with ends, warnings.catch_warnings(action="ignore"):
            trainer.fit(
                module, DataLoader(data, batch_size=2), DataLoader(data[:1]), ckpt_path=file if resumes else None
            )
    return module.seen


def call_wrapper(owner, wrapper, original, *args, **kwargs):
    return wrapper(original, owner, *args, **kwargs)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": 3},
        {"max_steps": 12},
        {"max_epochs": 3, "val_check_interval": 0.5},
        {"max_steps": 12, "val_check_interval": 0.25},
        {"max_epochs": 3, "check_val_every_n_epoch": 2, "min_epochs": 1},
    ],
)
def test_a_resumed_training_does_each_thing_once(monkeypatch, tmp_path, options):
    if "check_val_every_n_epoch" in options:
        monkeypatch.setattr(Small, "configure_optimizers", lambda self: torch.optim.SGD(self.parameters(), lr=1.0))
    whole = train(monkeypatch, None, options)
    assert {event for _, event, *_ in whole} == {"train", "batch ends", "validate", "epoch ends"}
    for step in range(1, 12):
        file = tmp_path / f"{step}.ckpt"
        before = train(monkeypatch, file, options, save_at=step)
        assert before + train(monkeypatch, file, options, resumes=True) == whole, step
