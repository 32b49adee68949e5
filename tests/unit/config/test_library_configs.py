"""Files of accelerate and of the Hugging Face Trainer stand for the DeepSpeed config that these libraries make."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from autods.config.base_config import check_base_config, read_base_config
from autods.errors import InputError
from tests.support.ds_configs import TRAINER

ACCELERATE = """
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_save_16bit_model: 'true'
mixed_precision: bf16
"""


def test_accelerates_yaml_is_the_config_that_it_stands_for(tmp_path: Path) -> None:
    path = tmp_path / "acc.yaml"
    path.write_text(ACCELERATE)
    config = read_base_config(path)
    assert config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
    }


def test_accelerates_yaml_may_name_a_file_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    path = tmp_path / "acc.yml"
    path.write_text(f"deepspeed_config:\n  deepspeed_config_file: {tmp_path}/ds.json\n")
    assert read_base_config(path) == {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 1}}


def test_accelerate_runs_fp8_inside_bf16(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(ACCELERATE.replace("bf16", "fp8"))
    assert read_base_config(tmp_path / "acc.yaml")["bf16"] == {"enabled": True}


def test_accelerate_reads_text_as_its_launcher_does(tmp_path: Path) -> None:
    text = ACCELERATE.replace(": 3", ": '2'").replace("cpu", "CPU").replace("none", "NONE").replace("bf16", "BF16")
    (tmp_path / "acc.yaml").write_text(text + "distributed_type: DEEPSPEED")
    config = read_base_config(tmp_path / "acc.yaml")
    assert config["zero_optimization"]["stage"] == 2
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in config["zero_optimization"]
    assert config["bf16"] == {"enabled": True}


@pytest.mark.parametrize("off", ["0", "0.0", "'0'"])
def test_accelerate_drops_a_clipping_of_0(tmp_path: Path, off: str) -> None:
    """DeepSpeed's default then decides. Source: DeepSpeedPlugin in accelerate 1.15, utils/dataclasses.py."""
    (tmp_path / "acc.yaml").write_text(ACCELERATE.replace("zero_stage", f"gradient_clipping: {off}\n  zero_stage"))
    assert "gradient_clipping" not in read_base_config(tmp_path / "acc.yaml")


def test_accelerates_file_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "acc.json").write_text('{"distributed_type": "DEEPSPEED", "mixed_precision": "bf16"}')
    assert read_base_config(tmp_path / "acc.json")["zero_optimization"] == {"stage": 2}


# The fields of accelerate's ClusterConfig beside those that decide about DeepSpeed.
OTHER_FIELDS = (
    "compute_environment", "use_cpu", "debug", "machine_rank", "gpu_ids", "main_process_ip", "main_process_port",
    "rdzv_backend", "same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "ipex_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config",
)  # fmt: skip


@pytest.mark.parametrize("field", OTHER_FIELDS)
def test_no_field_of_accelerates_is_called_misspelt(tmp_path: Path, field: str) -> None:
    (tmp_path / "acc.yaml").write_text(f"deepspeed_config: {{zero_stage: 3}}\n{field}: null")
    assert read_base_config(tmp_path / "acc.yaml")["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    ("said", "half"), [("no", {}), ("'no'", {}), ("BF16", {"bf16": {"enabled": True}}), ("null", {})]
)
def test_accelerates_precision_is_read_as_it_reads_it(tmp_path: Path, said: str, half: dict[str, Any]) -> None:
    (tmp_path / "acc.yaml").write_text(f"deepspeed_config: {{zero_stage: 3}}\nmixed_precision: {said}")
    config = read_base_config(tmp_path / "acc.yaml")
    assert {name: config[name] for name in ("bf16", "fp16") if name in config} == half


def test_accelerate_refuses_what_the_named_file_decides(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    text = "deepspeed_config: {deepspeed_config_file: ds.json, zero_stage: 3}\nmixed_precision: bf16"
    (tmp_path / "acc.yaml").write_text(text)
    with pytest.raises(InputError, match="refuses zero_stage, mixed_precision beside deepspeed_config_file"):
        read_base_config(tmp_path / "acc.yaml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("distributed_type: FSDP", "has neither a deepspeed_config of accelerate nor keys of DeepSpeed"),
        ("a: [", "acc.yaml:1:5: is not YAML: "),
        ("deepspeed: {gradient_clipping: .nan}", "acc.yaml: is not YAML: ValueError"),
        ("deepspeed: &a {b: *a}", "acc.yaml: is not YAML: "),
        ("- 1", "has neither a deepspeed_config of accelerate nor keys of DeepSpeed"),
        ("deepspeed_config: {zero_optimization: {stage: 2}}", "accelerate does not read zero_optimization there"),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: ds.json",
            "acc.yaml: deepspeed_config: accelerate reads fields",
        ),
        ("deepspeed_config: {deepspeed_config_file: acc.yaml}", "deepspeed_config_file: is YAML"),
        (
            "deepspeed_config: {deepspeed_config_file: no.json}",
            "acc.yaml: deepspeed_config_file: there is no file no.json",
        ),
        ("deepspeed: zero2", "acc.yaml: deepspeed: there is no file zero2\n  it is ms-swift's own name"),
        ("deepspeed_config: {zero_stages: 3}", "accelerate ignores zero_stages\n  did you mean zero_stage?"),
        (
            "deepspeed_config: {zero_stages: 3, zero3_init_flags: true}",
            "accelerate ignores zero_stages, zero3_init_flags\n  did you mean zero_stage, zero3_init_flag?",
        ),
        (
            "deepspeed_config: {zero_stage: 3}\nmixed_precission: bf16",
            "acc.yaml: accelerate refuses mixed_precission\n  did you mean mixed_precision?",
        ),
        (
            "deepspeed_config: {zero_stage: 3}\nmixed_precision: bfloat16",
            "acc.yaml: mixed_precision: accelerate knows no bfloat16\n  one of no, bf16, fp16, fp8",
        ),
        (
            "distributed_type: DEEPSPEED\nzero_stage: 3\ndeepspeed_config_file: ds.json",
            "accelerate refuses zero_stage, deepspeed_config_file at the top\n  write them below deepspeed_config",
        ),
    ],
)
def test_other_yaml_is_refused_with_its_place(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "acc.yaml").write_text(text)
    with pytest.raises(InputError, match=re.escape(problem)):
        read_base_config(tmp_path / "acc.yaml")


def test_a_file_that_is_named_may_stand_beside_the_one_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    (tmp_path / "acc.yaml").write_text("deepspeed_config: {deepspeed_config_file: ds.json}")
    assert read_base_config(tmp_path / "acc.yaml")["zero_optimization"] == {"stage": 1}


def test_deepspeeds_own_config_may_be_yaml(tmp_path: Path) -> None:
    (tmp_path / "ds.yaml").write_text("zero_optimization: {stage: 2}\nbf16: {enabled: true}")
    assert read_base_config(tmp_path / "ds.yaml") == {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}


# ------------------------------------------------------------------------------------------------- TrainingArguments

ARGUMENTS: dict[str, Any] = {
    "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 8, "learning_rate": 2e-5,
    "bf16": True, "weight_decay": 0.1, "max_grad_norm": 0.3, "warmup_steps": 100,
}  # fmt: skip


def read_arguments(folder: Path, deepspeed: Any = TRAINER, **arguments: Any) -> dict[str, Any]:
    (folder / "args.json").write_text(json.dumps({**ARGUMENTS, "deepspeed": deepspeed, **arguments}))
    return read_base_config(folder / "args.json")


def test_auto_is_what_the_training_arguments_say(tmp_path: Path) -> None:
    config = read_arguments(tmp_path)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 8)
    assert "train_batch_size" not in config  # the product
    assert config["gradient_clipping"] == 0.3
    params = {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert config["optimizer"]["params"] == params
    schedule = {"warmup_min_lr": 0, "warmup_max_lr": 2e-5, "warmup_num_steps": 100}
    assert config["scheduler"]["params"] == schedule
    check_base_config(config, world_size=8)  # no "auto" is left that it refuses


def test_arguments_that_are_not_given_have_their_defaults(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    (tmp_path / "args.json").write_text(json.dumps({"output_dir": "o", "deepspeed": config}))
    read = read_base_config(tmp_path / "args.json")
    assert (read["train_micro_batch_size_per_gpu"], read["gradient_clipping"]) == (8, 1.0)


def test_the_arguments_choose_the_precision(tmp_path: Path) -> None:
    assert read_arguments(tmp_path, {"gradient_clipping": "auto"})["bf16"] == {"enabled": True}
    halves = read_arguments(tmp_path, {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, bf16=False, fp16=True)
    assert (halves["fp16"], halves["bf16"]) == ({"enabled": True}, {"enabled": False})


def test_training_arguments_may_be_yaml_and_name_a_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(TRAINER))
    (tmp_path / "sft.yaml").write_text("deepspeed: ds.json\nper_device_train_batch_size: 2\nlearning_rate: 1e-4\n")
    config = read_base_config(tmp_path / "sft.yaml")
    assert (config["train_micro_batch_size_per_gpu"], config["optimizer"]["params"]["lr"]) == (2, 1e-4)
    (tmp_path / "axolotl.yml").write_text("deepspeed: ds.json\nmicro_batch_size: 3\nbf16: auto\n")
    config = read_base_config(tmp_path / "axolotl.yml")
    assert (config["train_micro_batch_size_per_gpu"], "bf16" in config) == (3, False)


@pytest.mark.parametrize(
    ("text", "is_number"),
    [
        ("train_batch_size: 8\nzero_optimization: {reduce_bucket_size: 5e8}", True),  # as OmegaConf reads it
        ("deepspeed: {zero_optimization: {reduce_bucket_size: 5.0E8}}", True),
        ('train_batch_size: 8\nzero_optimization: {reduce_bucket_size: "5e8"}', False),
        ("output_dir: out\ndeepspeed: {zero_optimization: {reduce_bucket_size: 5e8}}", False),  # by PyYAML
    ],
)
def test_a_power_of_ten_is_a_number_where_hydra_reads_the_file(tmp_path: Path, text: str, is_number: bool) -> None:
    (tmp_path / "ds.yaml").write_text(text)
    size = read_base_config(tmp_path / "ds.yaml")["zero_optimization"]["reduce_bucket_size"]
    assert size == (500_000_000 if is_number else "5e8")


@pytest.mark.parametrize("place", ["llm/ds_config", "config"])  # of an older one, and of 4.6
def test_ms_swifts_names_are_files_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    folder = tmp_path / "swift" / place
    folder.mkdir(parents=True)
    (tmp_path / "swift" / "__init__.py").write_text("raise SystemExit('it is found, not imported')")
    (folder / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "sft.yaml").write_text("deepspeed: zero2")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert read_base_config(tmp_path / "sft.yaml")["zero_optimization"] == {"stage": 2}


def test_what_the_trainer_computes_of_the_data_stays_auto(tmp_path: Path) -> None:
    params = {"total_num_steps": "auto", "warmup_num_steps": "auto"}
    scheduler = {"type": "WarmupDecayLR", "params": params}
    read = read_arguments(tmp_path, {"scheduler": scheduler}, warmup_steps=0.1)
    assert read["scheduler"]["params"] == params
    read = read_arguments(tmp_path, {"scheduler": scheduler}, max_steps=500)
    assert read["scheduler"]["params"] == {"total_num_steps": 500, "warmup_num_steps": 100}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"deepspeed": None}, "are TrainingArguments that name no DeepSpeed config"),
        ({"deepspeed": "nowhere.json"}, "deepspeed: there is no file nowhere.json"),
        ({"deepspeed": "ds.yaml"}, "deepspeed: is YAML"),
        (
            {"deepspeed": {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0}},
            "the Trainer refuses it: train_micro_batch_size_per_gpu is 2, but per_device_train_batch_size 4; "
            "gradient_clipping is 1.0, but max_grad_norm 0.3",
        ),
        ({"deepspeed": {"bf16": {"enabled": False}}}, "bf16.enabled is false, but bf16 true"),
    ],
)
def test_training_arguments_that_do_not_work_are_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        read_arguments(tmp_path, **given)


@pytest.mark.parametrize("value", ["2020-01-01", 5, [], {}, True, "x" * 5000, "\0", "", 1e300])
def test_an_argument_of_any_value_ends_in_a_config_or_a_refusal(tmp_path: Path, value: Any) -> None:
    for name in ("deepspeed", *ARGUMENTS, "adam_beta1", "max_steps", "warmup_ratio", "auto_find_batch_size"):
        try:
            read_arguments(tmp_path, **{name: value})
        except InputError:
            continue
        (tmp_path / "args.yaml").write_text((tmp_path / "args.json").read_text())
        assert json.dumps(read_base_config(tmp_path / "args.yaml"))


def test_a_batch_that_the_trainer_looks_for_may_differ(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2}
    assert read_arguments(tmp_path, config, auto_find_batch_size=True)["train_micro_batch_size_per_gpu"] == 2


def test_arguments_that_name_themselves_end(tmp_path: Path) -> None:
    assert read_arguments(tmp_path, str(tmp_path / "args.json"))["per_device_train_batch_size"] == 4


def test_a_section_of_a_scripts_own_file_is_the_config(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": "auto"}}
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps({"data": {"path": "x"}, "deepspeed": config}), encoding="utf-8")
    assert read_base_config(file) == config


def test_the_trainers_plugin_fills_in_the_stage(tmp_path: Path) -> None:
    zero = {"stage": "auto", "offload_param": {"device": "auto"}, "stage3_gather_16bit_weights_on_model_save": "auto"}
    filled = {"stage": 2, "offload_param": {"device": "none"}, "stage3_gather_16bit_weights_on_model_save": False}
    assert read_arguments(tmp_path, {"zero_optimization": zero})["zero_optimization"] == filled
