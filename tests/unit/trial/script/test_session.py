"""What of a DeepSpeed config is the script's and what the trial's."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.trial.job import RankJob
from autods.trial.script import engine_hooks
from autods.trial.script.session import Session
from autods.types import WorkloadSource

TRIALS = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def session(*argv: str, **said) -> Session:
    source = WorkloadSource(kind="script", path="/train.py", name="train", digest="", argv=argv)
    asked = {"ds_config": TRIALS, "micro_batch": 4, "accumulation": 2, "world_size": 2, **said}
    job = RankJob(job="train", source=source, device="cpu", folder="/f", scratch="/s", **asked)
    return Session(job=job, slot=0, observer=None, leave=pytest.fail)


def test_the_rung_and_the_batch_are_the_trial_s_and_all_else_stays():
    users = {
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "round_robin_gradients": True},
        "tensorboard": {"enabled": True},
    }
    config = session().final(users, own_optimizer=False)
    assert config == {
        **TRIALS,
        "gradient_clipping": 0.5,
        "zero_optimization": {**TRIALS["zero_optimization"], "round_robin_gradients": True},
    }


def test_a_config_names_no_optimizer_where_the_script_brings_one():
    assert "optimizer" not in session().final({}, own_optimizer=True)


def test_a_trial_that_saves_may_gather_the_weights():
    config = session(exam="worst_case").final({}, own_optimizer=True)
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_a_survey_of_one_rank_keeps_the_batch_identity():
    assert session(micro_batch=1, accumulation=1, world_size=1).file["train_batch_size"] == 1


def test_what_the_script_was_given_is_not_its_own_but_what_it_changed_is():
    given = session("--config", "{ds_config}")
    seen = {
        **given.file,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
        "zero_optimization": {**given.file["zero_optimization"], "round_robin_gradients": True},
    }
    own = given.own_config(seen, from_file=True)
    assert own == {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
        "zero_optimization": {"round_robin_gradients": True},
    }


def test_a_file_of_its_own_says_the_global_batch_and_a_dict_does_not():
    users = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 1}
    assert session().own_config(users, from_file=True) == {"train_batch_size": 64, "steps_per_print": 1}
    assert session().own_config(users, from_file=False) == {"steps_per_print": 1}


def test_a_kind_may_fill_the_file_and_merge_in_its_own_way():
    own = session()
    own.file = {"train_micro_batch_size_per_gpu": "auto"}
    own.merge = lambda users: dict(users)
    assert own.final({"steps_per_print": 7, "wandb": {}}, own_optimizer=False) == {"steps_per_print": 7}
    assert Path(own.job.folder) == Path("/f")


@pytest.fixture
def ended(monkeypatch):
    """What happens, in order, when a script of so many steps ends its process group, or one of some ranks."""
    seen: list[object] = []

    def ended(steps: int, *group: object) -> list[object]:
        one = session(exam="worst_case")
        one.engine, one.clock.times = object(), [0.1] * steps
        engine_hooks._ended(one, seen.append, *group)
        return seen

    monkeypatch.setattr(Session, "ended", lambda self: seen.append("examined"))
    return ended


def test_what_is_left_of_an_exam_is_done_before_the_script_ends_its_process_group(ended):
    assert ended(3) == ["examined", None]


def test_a_script_that_ended_too_early_is_not_examined(ended):
    assert ended(0) == [None]


def test_a_group_of_some_ranks_may_end_at_any_time(ended):
    assert ended(3, "some ranks") == ["some ranks"]
