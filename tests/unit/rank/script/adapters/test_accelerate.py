"""Accelerate's plugins, of which a script may have one for each of its models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DummyOptim

from autods.rank.script.adapters.accelerate import _fill_plugin, _prepare
from autods.rank.script.engine_config import LibraryConfig
from tests.support.script_trials import script_job

CHOSEN = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
STUDENT = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}, "gradient_clipping": 0.5}
TEACHER = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}}}


@pytest.fixture
def config() -> LibraryConfig:
    return LibraryConfig(script_job(ds_config=CHOSEN, micro_batch=1, accumulation=1))


def make_plugin(config: LibraryConfig, given: Any, clipping: float | None = None) -> Any:
    """A DeepSpeedPlugin, as far as it is filled and read."""
    plugin = SimpleNamespace(hf_ds_config=given, gradient_clipping=clipping)
    _fill_plugin(config, lambda plugin: None, plugin)
    plugin.deepspeed_config = plugin.hf_ds_config
    return plugin


def prepare(config: LibraryConfig, plugin: Any, *args: Any, plugins: Any = None, engine: Any = None) -> dict[str, Any]:
    """The config that the plugin has when accelerate makes the engine."""
    injection = SimpleNamespace(job=config.job, policy=SimpleNamespace(engine=engine))
    return prepare_by(injection, config, plugin, 1, *args, plugins=plugins)


def prepare_by(
    injection: Any, config: LibraryConfig, plugin: Any, steps: int, *args: Any, plugins: Any = None
) -> dict[str, Any]:
    """The same where the Accelerator accumulates so many micro batches."""
    state = SimpleNamespace(deepspeed_plugins=plugins or plugin)
    accelerator = SimpleNamespace(deepspeed_plugin=plugin, gradient_accumulation_steps=steps, state=state)
    prepared: dict[str, Any] = _prepare(
        injection, config, lambda accelerator, *args: dict(plugin.deepspeed_config), accelerator, *args
    )
    return prepared


def test_each_model_has_the_config_of_its_plugin(config: LibraryConfig) -> None:
    student, teacher = make_plugin(config, STUDENT), make_plugin(config, TEACHER)
    prepare(config, student, torch.nn.Linear(1, 1), DummyOptim([]))
    assert config.given == STUDENT
    prepare(config, teacher, torch.nn.Linear(1, 1))
    assert config.given == TEACHER


def test_a_model_that_is_only_evaluated_needs_no_optimizer(config: LibraryConfig) -> None:
    plugins = {"student": make_plugin(config, STUDENT), "teacher": make_plugin(config, TEACHER)}
    frozen = prepare(config, plugins["teacher"], torch.nn.Linear(1, 1), plugins=plugins)
    assert "optimizer" not in frozen
    assert config.for_frozen_model(frozen)["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}


def test_one_plugin_trains_by_the_optimizer_of_the_chosen_config(config: LibraryConfig) -> None:
    trained = prepare(config, make_plugin(config, TEACHER), torch.nn.Linear(1, 1))
    assert trained["optimizer"] == CHOSEN["optimizer"]


def test_a_model_after_the_trained_one_needs_no_optimizer(config: LibraryConfig) -> None:
    assert "optimizer" not in prepare(config, make_plugin(config, TEACHER), torch.nn.Linear(1, 1), engine=object())


def test_a_loader_prepared_alone_leaves_the_optimizer_to_the_model(config: LibraryConfig) -> None:
    plugin = make_plugin(config, {"zero_optimization": {"stage": 2}})
    plugins = {"student": plugin, "teacher": make_plugin(config, TEACHER)}
    for names in (None, plugins):
        prepare(config, plugin, torch.utils.data.DataLoader([1]), plugins=names)
        trained = prepare(config, plugin, torch.nn.Linear(1, 1), DummyOptim([]), plugins=names)
        assert trained["optimizer"] == CHOSEN["optimizer"]


@pytest.mark.parametrize(("stage", "frozen"), [(0, 0), (1, 0), (2, 0), (3, 3)])
def test_a_frozen_model_without_a_stage_of_its_own_is_whole(config: LibraryConfig, stage: int, frozen: int) -> None:
    config.given = {"zero_optimization": {"stage": 2}}
    assert config.for_frozen_model({"zero_optimization": {"stage": stage}})["zero_optimization"] == {"stage": frozen}


@pytest.mark.parametrize(
    ("given", "clipping", "variable", "clips_at"),
    [
        (None, None, None, 1.0),
        (None, None, "0.5", 0.5),
        (None, 0.3, "0.5", 0.3),
        (None, 0.0, None, None),
        ({"gradient_clipping": "auto"}, 0.3, None, "auto"),
        ({"zero_optimization": {"stage": 2}}, 0.3, "0.5", None),
    ],
)
def test_gradients_are_clipped_as_accelerate_does(
    config: LibraryConfig, monkeypatch: Any, given: Any, clipping: Any, variable: Any, clips_at: Any
) -> None:
    monkeypatch.delenv("ACCELERATE_GRADIENT_CLIPPING", raising=False)
    if variable:
        monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", variable)
    plugin = make_plugin(config, given, clipping)
    assert plugin.deepspeed_config.get("gradient_clipping") == clips_at


@pytest.mark.parametrize(("steps", "warned"), [(1, 0), (2, 0), (4, 1)])
@pytest.mark.parametrize("in_run", [False, True])
def test_a_script_with_another_accumulation_is_warned(steps: int, warned: int, in_run: bool) -> None:
    job = script_job(ds_config=CHOSEN, micro_batch=1, accumulation=2)
    config, warnings = LibraryConfig(job), list[str]()
    host = SimpleNamespace(note=warnings.append) if in_run else None
    injection = SimpleNamespace(job=job, warnings=warnings, policy=SimpleNamespace(host=host, engine=None))
    prepare_by(injection, config, make_plugin(config, STUDENT), steps, DummyOptim([]))
    assert len(warnings) == warned
