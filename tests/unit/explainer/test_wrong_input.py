"""What is no config is refused in two lines; a config may be wrong in every way that can be explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autods
from autods.cli.main import main
from autods.errors import InputError


def nested(depth: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for _ in range(depth):
        config = {"deeper": config}
    return config


def holding_itself() -> dict[str, Any]:
    config: dict[str, Any] = {}
    config["again"] = config
    return config


@pytest.mark.parametrize(
    "config",
    [
        {"a": object()}, {"a": b"bytes"}, {"a": {1, 2}}, {"a": float("nan")}, {"a": float("inf")}, {"a": 10**400},
        nested(100_000), holding_itself(),
    ],
    ids=["object", "bytes", "set", "nan", "infinity", "10^400", "deep", "circular"],
)  # fmt: skip
def test_what_json_does_not_have_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot be written as JSON"):
        autods.explain(config)


@pytest.mark.parametrize("gpus", [-1, 0, 10**40])
def test_ranks_that_cannot_be_are_refused(gpus: int) -> None:
    with pytest.raises(InputError, match="--gpus"):
        autods.explain({"train_batch_size": 8}, gpus=gpus)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
@pytest.mark.parametrize("params", [[1], 3, "lr", None, {1: 2}])
def test_params_of_any_kind_are_explained(section: str, params: Any) -> None:
    explanation = autods.explain({section: {"type": "Adam", "params": params}})
    assert section in {key.key.partition(".")[0] for key in explanation.keys}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on", "a100-80gb"), ("device", "cpu"), ("seq_len", 8), ("nodes", 2), ("micro_batch", 1), ("kind", "script"),
        ("task", "seq2seq"), ("target_len", 8), ("lora", 8),
        ("gpu_memory", "16GiB"), ("host_memory", 2**30), ("nvme", "1TiB"),
    ],
)  # fmt: skip
def test_an_option_about_a_workload_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(InputError, match=f"{option} has no effect without a workload"):
        autods.explain({}, **{name: value})
    (tmp_path / "x.json").write_text("{}")
    assert main(["explain", str(tmp_path / "x.json"), option, str(value)]) == 2
    assert f"{option} has no effect" in capsys.readouterr().err


def test_arguments_of_a_script_need_one() -> None:
    with pytest.raises(InputError, match="-- ARGS has no effect without a workload"):
        autods.explain({}, script_args=["--lr", "3"])


class Broken(dict[str, Any]):
    def keys(self) -> Any:
        raise ZeroDivisionError

    __iter__ = keys


def test_a_mapping_that_breaks_is_refused() -> None:
    with pytest.raises(InputError, match="config: cannot be written as JSON: ZeroDivisionError"):
        autods.explain(Broken(a=1))


# What a file holds, the exit code, and what is said of it.
FILES = {
    "a number of 5,001 digits": ('{"train_batch_size": 1' + "0" * 5000 + "}", 2, "a number of thousands of digits"),
    "the largest number": ('{"train_batch_size": 9223372036854775807}', 0, "9,223,372,036,854,775,807"),
    "a key of two lines": (r'{"a\nerror: b": 1}', 1, r"a\nerror: b = 1"),
    "a key that turns text": (r'{"a\u202eb\u001b[31m\u0000": 1}', 1, r"a\u202eb\x1b[31m\x00 = 1"),
    "half a character": (r'{"a\ud800": "\udfff"}', 1, r'a\ud800 = "\udfff"'),
    "no key": ('{"": 1, "zero_optimization": {"": 2}}', 1, '"" = 2'),
    "markup": ('{"[red]a": "[bold]b[/x]"}', 1, '[red]a = "[bold]b[/x]"'),
    "a list as section": ('{"zero_optimization": [1, 2]}', 1, "must be an object, not [1, 2]"),
    "a section as stage": ('{"zero_optimization": {"stage": {"a": 1}}}', 1, "error: zero_optimization.stage"),
    "a list as device": (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": ["cpu"]}}}', 1, "should be 'none', 'cpu' or"
    ),
    "a list as optimizer": ('{"optimizer": {"type": ["Adam"]}}', 1, "must be a name"),
    "a list as schedule": ('{"scheduler": {"type": [1], "params": {"x": 1}}}', 1, "must be a name"),
    "text as section": ('{"fp16": "auto"}', 1, "must be an object"),
    "a number below 0": ('{"train_batch_size": -8}', 1, "must be a whole number above 0"),
    "a long value": (f'{{"a": "{"x" * 10**5}"}}', 1, "x…"),
    "a long key": (f'{{"{"x" * 10**5}": 1}}', 1, "x… = 1"),
    "many keys": (json.dumps({f"k{n}": 1 for n in range(50_000)}), 1, "… 49,800 more keys: --json has them all"),
    "many keys of a section": (
        json.dumps({"optimizer": {"type": "Adam", "params": {f"k{n}": 1 for n in range(5_000)}}}), 1, "4,800 more keys"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "code", "said"), FILES.values(), ids=list(FILES))
def test_a_file_of_any_content_is_explained_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, said: str
) -> None:
    (tmp_path / "x.json").write_text(text)
    assert main(["explain", str(tmp_path / "x.json"), "-q"]) == code
    out, err = capsys.readouterr()
    shown = out + err
    assert said in shown or said in " ".join(shown.split())
    assert len(shown) < 100_000
    assert not set(shown) & set("\x1b\0\u202e\ud800")


@pytest.mark.timeout(60)
def test_what_deepspeed_does_not_name_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Config:
        def __init__(self, config: dict[str, Any]) -> None:
            asked.extend(config)

    monkeypatch.setattr("deepspeed.runtime.config.DeepSpeedConfig", Config)
    autods.explain({f"k{n}": 1 for n in range(50_000)} | {"train_batch_size": 8})
    assert asked == ["train_batch_size"]


def test_a_micro_batch_of_0_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def build_model(): ...\ndef build_batch(n): ...\n")
    with pytest.raises(InputError, match="--micro-batch 0: at least one sample is needed"):
        autods.explain({}, tmp_path / "m.py", gpus=1, gpu_memory="1GiB", micro_batch=0)


def test_a_switch_as_micro_batch_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def build_model(): ...\ndef build_batch(n): ...\n")
    config = {
        "train_micro_batch_size_per_gpu": True,
        "gradient_accumulation_steps": 0,
    }  # an error: nothing is simulated
    explanation = autods.explain(config, tmp_path / "m.py", gpus=1, gpu_memory="1GiB")
    assert [each.key for each in explanation.findings[:2]] == ["gradient_accumulation_steps", *list(config)[:1]]
