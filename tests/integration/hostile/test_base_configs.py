"""A base config that contradicts itself, or that DeepSpeed refuses, is named with its key and a fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from tests.support.hostile import Case, Way, each

FIT = "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB --config quick --quiet --out out --base-config base.json"


def config(content: Any, message: str, *, code: int = 2, way: Way = "here") -> Case:
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    leaves = ("out",) if way == "ranks" else ()
    return Case(FIT, code, message, way, files={"base.json": text}, leaves=leaves, seconds=400)


FILES = {
    "empty": config("", "base.json:1:1: is not JSON"),
    "two objects": config('{"a": 1} {"b": 2}', "base.json:1:10: is not JSON"),
    "a comma is missing": config('{"a": 1 "b": 2}', "base.json:1:9: is not JSON"),
    "a key twice": config('{"a": 1, "a": 2}', 'base.json: has "a" twice in one section'),
    "NaN": config('{"a": NaN}', "base.json: contains NaN"),
    "Infinity": config('{"a": [-Infinity]}', "base.json: contains -Infinity"),
    "Python": config("{'a': True}", "base.json:1:2: is not JSON"),
    "null": config(None, "is JSON but not an object"),
    "a list": config([], "is JSON but not an object"),
    "UTF-16": config("{}".encode("utf-16"), "base.json: is not text"),
    "TrainingArguments without it": config(
        {"output_dir": "o"}, "base.json: are TrainingArguments that name no DeepSpeed"
    ),
    "comments, trailing commas, a mark": config('\ufeff{"steps_per_print": 5, # five\n}', "", code=0),
}
SECTIONS = {
    f"{key}: {json.dumps(value)}": config({key: value}, f'"{key}" must be an object, not {json.dumps(value)}')
    for key, value in {
        "zero_optimization": 3, "fp16": True, "bf16": None, "optimizer": "AdamW", "scheduler": [],
        "activation_checkpointing": 5, "flops_profiler": True, "autotuning": True, "aio": "auto",
        "tensorboard": "logs", "data_efficiency": [1], "comms_logger": True,
    }.items()
}  # fmt: skip
TYPES = {
    "stage: text": config({"zero_optimization": {"stage": "3"}}, '"zero_optimization.stage" is "3"'),
    "stage: 7": config({"zero_optimization": {"stage": 7}}, '"zero_optimization.stage" is 7; ZeRO has the stages 0 to'),
    "stage: true": config({"zero_optimization": {"stage": True}}, '"zero_optimization.stage" is true'),
    "stage: 2.0": config({"zero_optimization": {"stage": 2.0}}, '"zero_optimization.stage" is 2.0'),
    "fp16.enabled: text": config({"fp16": {"enabled": "true"}}, '"fp16.enabled" is "true"; it must be true or false'),
    "fp16.enabled: 1": config({"fp16": {"enabled": 1}}, '"fp16.enabled" is 1; it must be true or false'),
    "optimizer.type: 5": config({"optimizer": {"type": 5}}, '"optimizer.type" must be a name, not 5'),
    "optimizer.params: 5": config({"optimizer": {"type": "AdamW", "params": 5}}, '"optimizer.params" must be an obj'),
    "scheduler.params: []": config({"scheduler": {"params": []}}, '"scheduler.params" must be an object, not []'),
    "lr: text": config({"optimizer": {"params": {"lr": "fast"}}}, '"optimizer.params.lr" is "fast"; it must be a num'),
    "lr: negative": config({"optimizer": {"params": {"lr": -1}}}, '"optimizer.params.lr" is -1; it must be a number'),
    "clip: text": config({"gradient_clipping": "1"}, '"gradient_clipping" is "1"; it must be a number'),
    "clip: an object": config({"gradient_clipping": {}}, '"gradient_clipping" is {}; it must be a number'),
    "steps_per_print: 0": config({"steps_per_print": 0}, '"steps_per_print" is 0; it must be a number, at least 1'),
}
BATCHES = {
    f"{key}: {json.dumps(value)}": config({key: value}, f'"{key}" is {json.dumps(value)}; it must be a whole number')
    for key, value in {
        "train_batch_size": 0, "train_micro_batch_size_per_gpu": -4, "gradient_accumulation_steps": "4",
    }.items()
} | {
    "a fraction": config({"train_batch_size": 4.0}, '"train_batch_size" is 4.0; it must be a whole number'),
    "true": config({"train_batch_size": True}, '"train_batch_size" is true; it must be a whole number'),
    "no share for each rank": config({"train_batch_size": 3}, "train_batch_size 3 is no multiple of"),
    "sizes that contradict each other": config(
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1},
        "base.json: train_batch_size 8 ≠ micro batch 3 × accumulation 1 × 2 ranks",
    ),
    "left open": config(dict.fromkeys(("train_batch_size", "gradient_accumulation_steps"), "auto"), "", code=0),
}  # fmt: skip
REMOVED = {
    f"{key}: {json.dumps(value)}": config({key: value}, f'"{key}": DeepSpeed has removed it, and refuses the config')
    for key, value in {
        "amp": 5, "elasticity": 5, "compression_training": 5, "sparse_attention": {"mode": "fixed"},
        "nebula": {"enabled": False},
    }.items()
}  # fmt: skip
CONTRADICTIONS = {
    "amp with ZeRO": config(
        {"amp": {"enabled": True}, "zero_optimization": {"stage": 1}}, "amp and ZeRO exclude each other"
    ),
    "amp": config({"amp": {"enabled": True}}, "amp and ZeRO exclude each other, and every rung but ddp is ZeRO"),
    "fp16 with bf16": config({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
    "elastic training": config({"elasticity": {"enabled": True}}, "elastic training solves for the batch itself"),
    "its own search": config({"autotuning": {"enabled": True}}, "DeepSpeed Autotuning is a search of its own"),
    "ranks of a sequence": config({"sequence_parallel_size": 4}, "2 ranks make no groups of 4"),
    "ZenFlow": config({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow sets the accumulation itself"),
    **{
        f"auto: {key}": config(content, f'"{key}" is "auto", which only the Hugging Face Trainer fills in')
        for key, content in {
            "gradient_clipping": {"gradient_clipping": "auto"},
            "bf16.enabled": {"bf16": {"enabled": "auto"}},
            "optimizer.params.lr": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
            "scheduler.params.warmup_num_steps": {"scheduler": {"params": {"warmup_num_steps": "auto"}}},
        }.items()
    },
}


@each(FILES)
def test_a_file_that_is_no_config(meet, case):
    meet(case)


@each(REMOVED)
def test_a_key_that_deepspeed_has_removed(meet, case):
    meet(case)


@each(SECTIONS | TYPES | BATCHES)
def test_a_value_of_another_type(meet, case):
    meet(case)


@each(CONTRADICTIONS)
def test_a_config_that_contradicts_itself(meet, case):
    meet(case)


IN_A_TRIAL = {
    name: config(content, message, way="ranks")
    for name, (content, message) in {
        "a key that ZeRO does not have": ({"zero_optimization": {"stage_3": 1}}, "stage_3: Extra inputs are not"),
        "a key that bf16 does not have": ({"bf16": {"enabled": True, "typo": 1}}, "typo: Extra inputs are not"),
        "a bucket of nothing": ({"zero_optimization": {"reduce_bucket_size": -5}}, "reduce_bucket_size: Input should"),
        "an unknown optimizer": ({"optimizer": {"type": "Adamm"}}, "Adamm is not a supported DeepSpeed Optimizer"),
        "a parameter that the optimizer does not have": (
            {"optimizer": {"type": "AdamW", "params": {"rate": 1, "torch_adam": True}}},
            "unexpected keyword argument 'rate'",
        ),
        "an unknown scheduler": ({"scheduler": {"type": "Up"}}, "does not recognize LR scheduler Up"),
        "an unknown type of data": ({"communication_data_type": "int3"}, "Invalid communication_data_type"),
    }.items()
}


@each(IN_A_TRIAL)
def test_a_config_that_deepspeed_refuses_ends_the_fit(meet, tmp_path, case):
    assert meet(case).stderr.startswith("error: DeepSpeed config: ")
    tried = sorted(folder.name for folder in (tmp_path / "out").glob("logs/0*"))
    assert tried == ["001-ddp", "002-zero1"]  # another stage might have taken it


@pytest.mark.skipif(CPU_Accelerator().is_fp16_supported(), reason="this processor computes in fp16 (AVX512-FP16)")
def test_a_precision_that_the_device_lacks_ends_the_fit(meet):
    meet(config({"fp16": {"enabled": True}}, "this device has no fp16, and the config trains in fp16", way="ranks"))
