import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.base_config import (
    check_base_config,
    explain_refusal,
    find_config_place,
    read_base_config,
    resolve_global_batch,
)
from autods.errors import InputError
from autods.types import WorkloadSource

ON = {"enabled": True}


def test_a_deepspeed_json_file_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"gradient_clipping": 1.0, "fp16": ON}))
    assert read_base_config(path) == {"gradient_clipping": 1.0, "fp16": ON}


OF_A_MODEL = (
    "ValidationError: 1 validation error for DeepSpeedZeroConfig reduce_bucket_size Input should be greater than 0"
    " [type=greater_than, input_value=-5, input_type=int] For further information visit https://errors.pydantic.dev/2"
)
TYPES = "Invalid communication_data_type. Supported data types: ['fp16', 'bf16', 'fp32']. Got: fp8"
REFUSALS = {
    OF_A_MODEL: "zero_optimization.reduce_bucket_size: Input should be greater than 0; it is -5",
    "AssertionError: Foo is not a supported DeepSpeed Optimizer": (
        "optimizer.type: Foo is not a supported DeepSpeed Optimizer"
    ),
    "AssertionError: DeepSpeed does not recognize LR scheduler Nope": (
        "scheduler.type: DeepSpeed does not recognize LR scheduler Nope"
    ),
    f"ValueError: {TYPES}": TYPES,
}


@pytest.mark.parametrize("message", REFUSALS)
def test_a_refusal_of_deepspeeds_names_file_key_and_value(message: str) -> None:
    config = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": -5}, "optimizer": {"type": "Foo"},
        "scheduler": {"type": "Nope"}, "communication_data_type": "fp8",
    }  # fmt: skip
    refused = explain_refusal(config, message, place="ds.json", hint="the configuration was refused: correct it")
    assert refused is not None
    assert (refused.place, refused.problem, refused.exit_code) == ("ds.json", REFUSALS[message], 2)
    assert refused.hint == "correct the key there, or leave it out; autods explain checks the whole config"
    assert explain_refusal({"bf16": ON}, message, place="ds.json") is None


def test_the_place_of_a_base_config_is_its_file() -> None:
    source = WorkloadSource(kind="file", path="/w/model.py", name="model", digest="")
    assert find_config_place(source, None) is None
    assert find_config_place(source, "ds.json") == "ds.json"
    assert find_config_place(source, {"fp16": ON}) == "base config"
    assert find_config_place(replace(source, base_config="/w/ds.json"), None) == "/w/ds.json"
    assert find_config_place(replace(source, base_config={"fp16": ON}), None) == "/w/model.py"


def test_invalid_json_is_refused_with_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n  // half\n  "fp16": {"enabled": true}\n  "bf16": {}}')
    with pytest.raises(InputError, match=rf"{path}:4:3: is not JSON"):
        read_base_config(path)


def test_comments_and_trailing_commas_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    text = '{\n // our own\n "a": "http://x,}", # old: 2\n /* not\n now */ "b": [1, 2,],\n}'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())  # and the mark that editors of Windows put first
    assert read_base_config(path) == {"a": "http://x,}", "b": [1, 2]}


def test_what_json_has_no_word_for_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"gradient_clipping": NaN}')
    with pytest.raises(InputError, match="contains NaN, which is not JSON"):
        read_base_config(path)


def test_a_key_that_stands_twice_is_refused_as_deepspeed_does(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1, "stage": 2}}')
    with pytest.raises(InputError, match='has "stage" twice'):
        read_base_config(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"[1, 2]", "not an object"), (b"", "is not JSON"), (b"\xff\xfe\x00\x01", "is not text"), (b"nul", "is not JSON")],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_base_config(path)


@pytest.mark.parametrize("name", ["nowhere.json", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_base_config(tmp_path / name)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"amp": ON, "zero_optimization": {"stage": 2}}, "amp and ZeRO exclude each other"),
        ({"amp": ON, "fp16": ON}, "amp and ZeRO exclude each other"),
        ({"amp": ON}, "amp and ZeRO exclude each other"),
        ({"fp16": ON, "bf16": ON}, "fp16 and bf16 are both enabled"),
        ({"zero_optimization": {"stage": 4}}, "stages 0 to 3"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"update_interval": 4}}}, "ZenFlow sets the accumulation"),
        ({"elasticity": ON}, '"elasticity": elastic training solves for the batch'),
        ({"autotuning": ON}, '"autotuning": DeepSpeed Autotuning is a search of its own'),
        ({"zero_optimization": True}, '"zero_optimization" must be an object'),
        ({"bf16": True}, '"bf16" must be an object'),
        ({"optimizer": "AdamW"}, '"optimizer" must be an object'),
        ({"expert_parallel": "1e6"}, '"expert_parallel" must be an object'),
        ({"bf16": {"enabled": "false"}}, '"bf16.enabled" is "false"; it must be true or false'),
        (
            {"gradient_clipping": None},
            '"gradient_clipping" is null; it must be a number\n  write 0 to turn clipping off',
        ),
        ({"optimizer": {"params": {"lr": None}}}, '"optimizer.params.lr" is null; it must be a number\n  leave it out'),
        ({"train_batch_size": 0}, '"train_batch_size" is 0'),
        ({"train_micro_batch_size_per_gpu": "eight"}, "must be a whole number above 0"),
        ({"gradient_accumulation_steps": True}, "must be a whole number above 0"),
        ({"train_batch_size": 7}, "train_batch_size 7 is no multiple of 2 ranks"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 24}, "train_batch_size 64 is no multiple of micro"),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 5}, "accumulation 5 × 2 ranks"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_with_the_reason(config: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as caught:
        check_base_config(config, world_size=2, place="ds.json")
    assert said in str(caught.value)
    assert str(caught.value).startswith("ds.json: ")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"fp16": ON, "bf16": {"enabled": False}, "zero_optimization": {"stage": 3}},
        {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": None},
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5},
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
    ],
)
def test_settings_that_agree_are_accepted(config: dict[str, Any]) -> None:
    check_base_config(config, world_size=2)


# GPUs, and 64 = micro batch × accumulation × GPUs: one GPU, one node of four, two nodes of four.
TABLE = [(1, 8, 8), (4, 8, 2), (8, 8, 1)]


@pytest.mark.parametrize(("gpus", "micro", "accumulation"), TABLE)
def test_the_batch_identity_of_each_row_of_the_guide_is_accepted(gpus: int, micro: int, accumulation: int) -> None:
    config = batch(64, micro, accumulation)
    check_base_config(config, world_size=gpus)
    with pytest.raises(InputError, match=rf"× {gpus + 1} ranks\n  those sizes are for {gpus} rank"):
        check_base_config(config, world_size=gpus + 1)


def test_one_group_that_cannot_split_a_batch_is_one_group() -> None:
    base = {"train_batch_size": 1, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(InputError, match="cannot be split over 1 group of 2 ranks that train on the same samples"):
        resolve_global_batch(None, base, 1)


def test_batch_sizes_that_fit_no_number_of_ranks_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        check_base_config(batch(64, 24, 2), world_size=2)
    assert "those sizes are for" not in str(caught.value)


def batch(total: int, micro: int, accumulation: int) -> dict[str, int]:
    return {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }


@pytest.mark.parametrize(
    "config", [{"gradient_clipping": "auto"}, {"optimizer": {"params": {"lr": "auto"}}}, {"bf16": {"enabled": "auto"}}]
)
def test_auto_is_refused_where_only_the_hf_trainer_fills_it_in(config: dict[str, object]) -> None:
    with pytest.raises(InputError, match='is "auto"'):
        check_base_config(config, world_size=2)


def test_auto_is_accepted_for_what_the_rungs_and_growing_decide() -> None:
    zero = {"stage": "auto", "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    check_base_config({"train_batch_size": "auto", "zero_optimization": zero}, world_size=2)
