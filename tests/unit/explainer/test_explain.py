"""A config is explained key by key, and simulated where a workload is given."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.lr_schedules import VALID_LR_SCHEDULES

from autods import api
from autods.cli.main import main
from autods.config.deepspeed import BATCH_KEYS, get_key
from autods.config.problems import Problem
from autods.errors import InputError
from autods.explainer import explain as explainer
from autods.explainer.explain import ExplainSettings, explain, make_rung, resolve_explain
from autods.forecast.testing import ScriptedSimulator, simulate_peaks
from autods.forecast.values import EngineSpec, Simulation
from autods.report.answers.problems import make_explain_document
from autods.report.results.explain import Explanation
from autods.requests import ExplainRequest
from autods.types import WorkloadSource
from tests.support.ds_configs import GUIDE, PRETRAINING
from tests.support.planned import FACTS, GIB, LAPTOP, SOURCE
from tests.support.terminal import printed

SIZED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
    },
}


def explained(
    config: dict[str, Any], source: WorkloadSource = SOURCE, built_bytes: int = 0, **asked: Any
) -> tuple[Explanation, list[EngineSpec]]:
    """The explanation on a scripted simulator, and the engines that were simulated."""
    specs: list[EngineSpec] = []

    def peaks(spec: EngineSpec, micro_batch: int) -> Simulation:
        specs.append(spec)
        bucket = get_key(spec.ds_config, "zero_optimization.reduce_bucket_size") or 0
        made = simulate_peaks(micro_batch, build=0, init=GIB, backward=4 * GIB + 2 * bucket)
        return replace(made, live_bytes={**made.live_bytes, "build": {"host": built_bytes}})

    request = ExplainRequest(config=config, **asked)
    settings = resolve_explain(request, lambda plan: source, hardware=LAPTOP)
    simulator = ScriptedSimulator(FACTS, peaks)
    return explain(settings, lambda event: None, start=lambda source: nullcontext(simulator)), specs


def test_without_a_workload_nothing_is_simulated() -> None:
    explanation, specs = explained(GUIDE)
    assert specs == []
    assert explanation.memory is None
    keys = {key.key: key for key in explanation.keys}
    assert keys["fp16.loss_scale"].meaning.endswith("0 means that it adapts.")
    assert keys["zero_optimization.reduce_bucket_size"].default == 500_000_000
    assert [key.key for key in explanation.keys][:2] == ["train_batch_size", "train_micro_batch_size_per_gpu"]


def test_a_config_for_cpu_ranks_is_not_told_to_train_in_bf16() -> None:
    adam = {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}
    sizes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}
    config = {**sizes, "gradient_clipping": 1.0, "optimizer": adam}
    warned = {
        device: [each.key for each in explained(config, workload="model.py", gpus=2, **asked)[0].findings]
        for device, asked in {"cpu": {"device": "cpu", "gpu_memory": GIB}, "cuda": {"gpu_memory": GIB}}.items()
    }
    assert warned == {"cpu": [], "cuda": ["bf16"]}
    assert all(key.meaning for key in explained(config)[0].keys)


def test_the_engine_is_heard_where_no_rule_says_it_better(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Problem(severity="error", key="optimizer.type", problem="refused")
    monkeypatch.setattr(explainer, "find_refusals", lambda config, ranks: (refusal,))
    assert explained(SIZED)[0].findings[0] == refusal
    misspelt = {**SIZED, "zero_optimization": {"stage": 3, "overlap_com": True}}
    assert refusal not in explained(misspelt)[0].findings


def test_a_field_is_explained_under_both_of_its_names() -> None:
    config = {**SIZED, "zero_optimization": {"stage": 3, "max_live_parameters": 10**9}}
    (key,) = [each for each in explained(config)[0].keys if each.key.endswith("live_parameters")]
    assert key.meaning.startswith("Elements of collected parameters")


def test_a_key_below_the_old_name_of_bf16_has_its_meaning() -> None:
    (key,) = [each for each in explained({**SIZED, "bfloat16": {"enabled": True}})[0].keys if "bfloat16" in each.key]
    assert key.meaning == "Trains in bf16."


def test_the_optimizers_that_are_named_are_those_of_this_deepspeed() -> None:
    config = {**SIZED, "optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    keys = {key.key: key.meaning for key in explained(config)[0].keys}
    named = re.findall(r"\w+", keys["optimizer.type"].partition("(")[2].partition(")")[0])
    assert named == DEEPSPEED_OPTIMIZERS
    assert re.findall(r"\w+", keys["scheduler.type"].partition(":")[2]) == VALID_LR_SCHEDULES


def test_what_a_plan_assumes_is_said_but_for_the_batch() -> None:
    asked: dict[str, Any] = {"workload": "model.py", "gpus": 8, "gpu_memory": "40GiB"}
    memory = explained(SIZED, **asked)[0].memory
    assert memory is not None
    assert memory.assumed == ("host memory without a limit (--host-memory)",)


def test_each_sized_key_is_simulated_with_another_value() -> None:
    explanation, specs = explained(SIZED, workload="model.py", gpus=8, gpu_memory="40GiB", host_memory="1TiB")
    costs = {key.key: key.measured for key in explanation.keys if key.measured is not None}
    bucket = costs["zero_optimization.reduce_bucket_size"]
    assert bucket.instead == 50_000_000
    assert bucket.tiers["device"] == pytest.approx(2 * 450_000_000, rel=0.01)
    assert costs["zero_optimization.offload_optimizer.pin_memory"].tiers == {}
    assert "zero_optimization.allgather_bucket_size" not in costs  # stage 3 ignores it
    assert explanation.memory is not None
    assert explanation.memory.verdict == "fits"
    assert {get_key(spec.ds_config, "train_micro_batch_size_per_gpu") for spec in specs} == {4}
    assert all(get_key(spec.ds_config, "zero_optimization.offload_optimizer.device") == "cpu" for spec in specs)


@pytest.mark.parametrize(
    ("sizes", "asked_micro", "micro", "total"),
    [
        ((64, None, None), None, 8, 64),
        ((64, None, 4), None, 2, 64),
        ((64, 2, None), None, 2, 64),
        ((None, 2, None), None, 2, 16),
        ((None, 2, 3), None, 2, 48),
        ((None, "auto", "auto"), None, 1, None),
        ((None, 4, "auto"), None, 4, None),
        ((60, None, None), None, 1, None),  # an error
        ((64, None, 4), 1, 1, 32),
        ((64, None, None), 4, 4, 64),
    ],
)
def test_memory_is_that_of_the_batch_of_the_config(
    sizes: tuple[Any, ...], asked_micro: int | None, micro: int, total: int | None
) -> None:
    """DeepSpeed completes the sizes; without a total two micro batches stand for any longer accumulation."""
    config = {key: size for key, size in zip(BATCH_KEYS, sizes, strict=True) if size is not None}
    request = ExplainRequest(config, "model.py", gpus=8, gpu_memory="40GiB", micro_batch=asked_micro)
    settings = resolve_explain(request, lambda plan: SOURCE, hardware=LAPTOP)
    assert settings.plan is not None
    assert [(site.micro_batch, site.global_batch) for site in settings.plan.sites] == [(micro, total)]


def test_what_a_library_fills_in_is_left_to_deepspeed() -> None:
    config = {
        "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale": 0}, "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }  # fmt: skip
    request = ExplainRequest(config, "model.py", gpus=8, gpu_memory="40GiB")
    settings = resolve_explain(request, lambda plan: SOURCE, hardware=LAPTOP)
    assert settings.config == config
    assert settings.plan is not None
    assert settings.plan.sites[0].base == {
        "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"eps": 1e-6}},
        "zero_optimization": {"stage": 2},
    }  # fmt: skip


@pytest.mark.parametrize(("weight_bytes", "gpus", "warns"), [(4, 8, True), (0, 8, False), (4, 1, False)])
def test_a_script_that_loads_whole_under_stage_3_is_told(weight_bytes: int, gpus: int, warns: bool) -> None:
    script = replace(SOURCE, kind="script", script_kind="deepspeed")
    built_bytes = weight_bytes * FACTS.parameters
    explanation, _ = explained(SIZED, script, built_bytes, workload="train.py", gpus=gpus, gpu_memory="40GiB")
    hints = [finding.hint for finding in explanation.findings if "loads all of them first" in finding.problem]
    assert ["HfDeepSpeedConfig" in hint for hint in hints] == [True] * warns


def test_a_config_with_errors_is_not_simulated() -> None:
    wrong = {**SIZED, "fp16": {"enabled": True}}
    request = ExplainRequest(config=wrong, gpus=8)
    settings = ExplainSettings(name="config", config=wrong, ranks=8)
    explanation = explain(settings, lambda event: None)
    assert request.config == wrong
    assert explanation.has_errors
    assert explanation.memory is None


def test_a_rung_of_a_config_places_its_states() -> None:
    rung = make_rung("this config", GUIDE)
    assert (rung.stage, rung.shards) == (3, ("optimizer", "gradients", "parameters"))
    assert rung.places == {"parameters": "host", "gradients": "host", "optimizer": "host"}
    assert make_rung("this config", PRETRAINING).places["optimizer"] == "device"
    assert make_rung("this config", {}).stage == 0
    assert make_rung("this config", {"zero_optimization": {"stage": "auto"}}).shards == ()


def test_an_old_switch_of_offload_places_the_states() -> None:
    rung = make_rung("this config", {"zero_optimization": {"stage": 1, "cpu_offload": True}})
    assert rung.places == {"parameters": "device", "gradients": "host", "optimizer": "host"}
    assert rung.ds_config["zero_optimization"] == {"stage": 1, "offload_optimizer": {"device": "cpu"}}


def test_old_switches_beside_their_successors_stay_refused() -> None:
    zero = {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}
    assert make_rung("this config", {"zero_optimization": zero}).ds_config["zero_optimization"] == zero


def test_a_config_is_explained_on_one_machine() -> None:
    with pytest.raises(InputError, match="on one machine"):
        explained(SIZED, workload="model.py", gpus=8, on="all")


def test_the_terminal_shows_meaning_cost_and_findings() -> None:
    explanation, _ = explained(SIZED, workload="model.py", gpus=8, gpu_memory="40GiB", host_memory="1TiB")
    text = printed(make_explain_document(explanation), 80)
    assert "zero_optimization\n  stage = 3\n    What is split over the GPUs" in text
    assert re.search(r"Here: device memory \+85\d\.\d MiB against 50,000,000\.", text)
    assert "model on 8 ranks, micro batch 4 × accumulation 1: fits" in text
    assert "note: zero_optimization.allgather_bucket_size: stage 3 ignores it" in text


def test_the_command_ends_with_1_where_the_config_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(GUIDE))
    assert main(["explain", str(path), "--json"]) == 0
    keys = json.loads(capsys.readouterr().out)["keys"]
    assert {"key", "value", "default", "meaning", "cost"} <= set(keys[0])
    assert main(["explain", str(path), "--gpus", "8"]) == 1
    assert "24 ≠ micro batch 1 × accumulation 1 × 8 ranks" in " ".join(capsys.readouterr().out.split())
    path.write_text("[]")
    assert main(["explain", str(path)]) == 2


def test_a_dict_is_explained_from_python() -> None:
    assert api.explain(PRETRAINING, gpus=1).has_errors is False
    assert api.explain(PRETRAINING, gpus=2).has_errors is True


def test_what_deepspeed_ignores_is_called_ignored() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimisation": {"stage": 2, "overlap_com": True}}
    meanings = {key.key: key.meaning for key in explained(config)[0].keys}
    assert meanings["zero_optimisation.stage"] == meanings["zero_optimisation.overlap_com"] == "DeepSpeed ignores it."
    assert "ignores" not in meanings["train_micro_batch_size_per_gpu"]
