"""The DeepSpeed config of a script's engine: which keys are the script's and which the trial's."""

from __future__ import annotations

import base64
import json
from types import MappingProxyType

import pytest

from autods.rank.script.adapters.deepspeed import find_config
from autods.rank.script.engine_config import EngineConfig, LibraryConfig, read_config
from autods.rank.script.trial_policy import TrialPolicy
from autods.workload import WorkloadError
from tests.support.script_trials import script_job

TRIAL = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def job_of(*argv: str, **job):
    return script_job(argv=argv, **{"ds_config": TRIAL, "micro_batch": 4, "accumulation": 2, "world_size": 2, **job})


def engine_config(*argv: str, kind=EngineConfig, **job):
    return kind(job_of(*argv, **job))


def for_a_trial(config, **job):
    """The config as a trial's engine gets it."""
    return TrialPolicy(job_of(**job), slot=0, observer=None, leave=pytest.fail).adapt_config(config)


def test_the_trial_decides_the_rung_and_the_batch_only():
    script = {
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "round_robin_gradients": True},
        "tensorboard": {"enabled": True},
    }
    assert for_a_trial(engine_config().for_engine(script, has_optimizer=False)) == {
        **TRIAL,
        "gradient_clipping": 0.5,
        "zero_optimization": {**TRIAL["zero_optimization"], "round_robin_gradients": True},
    }


def test_a_script_with_an_optimizer_gets_a_config_without_one():
    assert "optimizer" not in engine_config().for_engine({}, has_optimizer=True)


def test_a_trial_that_saves_may_gather_the_weights():
    config = for_a_trial(engine_config().for_engine({}, has_optimizer=True), exam="worst_case")
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_the_batch_size_of_a_survey_fits_its_one_rank():
    assert engine_config(micro_batch=1, accumulation=1, world_size=1).file["train_batch_size"] == 1


def test_a_library_gets_the_global_batch_of_this_micro_batch():
    simulated = engine_config(kind=LibraryConfig, micro_batch=8)  # a forecast asks about larger ones than its config's
    assert simulated.file["train_batch_size"] == simulated.replace({})["train_batch_size"] == 32


def test_the_script_s_own_part_is_what_it_changed():
    config = engine_config("--config", "{ds_config}")
    seen = {
        **config.file,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
        "zero_optimization": {**config.file["zero_optimization"], "round_robin_gradients": True},
    }
    assert config.own_part(seen, from_file=True) == {
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}},
        "zero_optimization": {"round_robin_gradients": True},
    }


def test_only_a_config_file_sets_the_global_batch_size():
    script = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "steps_per_print": 1}
    config = engine_config()
    assert config.own_part(script, from_file=True) == {"train_batch_size": 64, "steps_per_print": 1}
    assert config.own_part(script, from_file=False) == {"steps_per_print": 1}
    implying = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    assert config.own_part(implying, from_file=True) == implying
    assert config.own_part(implying, from_file=False) == {}


def test_a_script_may_read_the_file_and_pass_what_it_holds():
    config = engine_config("--config", "{ds_config}")
    assert config.comes_filled_in({**config.file, "gradient_clipping": 1.0, "optimizer": {"type": "Lion"}})
    assert not config.comes_filled_in({**config.file, "zero_optimization": {"stage": 2}})
    assert not engine_config().comes_filled_in(TRIAL)


def test_a_library_s_completed_config_is_only_cleared_of_monitors():
    config = engine_config(kind=LibraryConfig)
    given = {"steps_per_print": 7, "wandb": {}}
    assert for_a_trial(config.for_engine(given, has_optimizer=False)) == {"steps_per_print": 7}


def test_a_library_gets_the_trial_s_config_in_place_of_the_script_s():
    config = engine_config(kind=LibraryConfig)
    assert config.replace({"train_batch_size": 1, "wall_clock_breakdown": True})["train_batch_size"] == 16
    assert config.own_part({"bf16": {"enabled": True}}, from_file=False) == {
        "wall_clock_breakdown": True,
        "bf16": {"enabled": True},
    }


def test_another_precision_than_the_trial_s_is_an_error():
    with pytest.raises(WorkloadError, match="it trains in bf16, and its config needs fp32"):
        engine_config(kind=LibraryConfig).for_engine({"bf16": {"enabled": True}}, has_optimizer=False)


def test_a_config_of_other_mappings_is_read_as_dicts():
    betas = MappingProxyType({"params": MappingProxyType({"betas": (0.9, 0.95)})})
    assert read_config(MappingProxyType({"optimizer": betas})) == {"optimizer": {"params": {"betas": [0.9, 0.95]}}}


@pytest.mark.parametrize("encode", [str, lambda text: base64.urlsafe_b64encode(text.encode()).decode()])
def test_a_config_in_a_text_may_be_longer_than_a_path(encode):
    config = {"zero_optimization": {"stage": 2}, "comment": "x" * 300}
    assert read_config(text := encode(json.dumps(config))) == config
    assert find_config({"args": None, "config": text, "config_params": None}) == (config, False)


@pytest.mark.parametrize("given", ["missing.json", "{", '["zero"]', 5, None])
def test_what_is_no_config_is_none(given):
    assert read_config(given) is None


def test_a_config_file_with_comments_is_read_as_deepspeed_does(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{\n  // fits on two cards\n  "zero_optimization": {"stage": 2},\n}\n')
    given = {"args": None, "config": str(file), "config_params": None}
    assert find_config(given) == ({"zero_optimization": {"stage": 2}}, True)
