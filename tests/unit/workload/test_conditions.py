"""Conditions bind the arguments of a workload's functions, and change what identifies it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autods.types import WorkloadSource
from autods.workload import Workload
from autods.workload.conditions import (
    apply_to_source,
    argument_names,
    bind_arguments,
    environment_variables,
    is_condition,
)

SOURCE = WorkloadSource(kind="file", path="/model.py", name="model", digest="d", argv=("--lr", "{lr}"))


def build_model(width: int = 8) -> object:
    return width


def build_batch(micro_batch_size: int, seq_len: int = 16, vocabulary: int = 10) -> object:
    return micro_batch_size, seq_len, vocabulary


WORKLOAD = Workload(build_model=build_model, build_batch=build_batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpus", "seq_len", "env.X", "args.lr", "build_model.width", "build_batch.seq_len"])
def test_conditions_are_recognised_by_name(name: str) -> None:
    assert is_condition(name)
    assert not is_condition(f"zero_optimization.{name}")


def test_environment_variables_are_text() -> None:
    assert environment_variables({"env.THREADS": 4, "gpus": 2}) == {"THREADS": "4"}


def test_arguments_of_a_workload_object_can_be_varied() -> None:
    assert argument_names(WORKLOAD, SOURCE, "build_model") == ("width",)
    assert argument_names(WORKLOAD, SOURCE, "build_batch") == ("seq_len", "vocabulary")


def test_arguments_of_a_file_are_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("1 / 0\ndef build_model(width=8): ...\ndef build_batch(n, **options): ...\n")
    source = replace(SOURCE, path=str(path))
    assert argument_names(path, source, "build_model") == ("width",)
    assert argument_names(path, source, "build_batch") is None  # it takes any


def test_arguments_and_lengths_are_bound() -> None:
    longest = replace(WORKLOAD, build_longest_batch=lambda micro_batch_size, seq_len=99: (micro_batch_size, seq_len))
    source = replace(SOURCE, seq_len=32, arguments={"build_model.width": 4, "build_batch.vocabulary": 7})
    bound = bind_arguments(longest, source)
    assert bound.build_model() == 4
    assert bound.build_batch(2) == (2, 32, 7)
    assert bound.build_longest_batch is not None
    assert bound.build_longest_batch(2) == (2, 32)


def test_conditions_of_the_workload_change_its_digest() -> None:
    assert apply_to_source(SOURCE, {"gpus": 2, "env.X": 1}) == SOURCE
    changed = apply_to_source(SOURCE, {"args.lr": 0.1, "seq_len": 8, "build_model.width": 4})
    assert changed.digest != SOURCE.digest
    assert (changed.argv, changed.seq_len) == (("--lr", "0.1"), 8)
    assert changed.arguments == {"build_model.width": 4}
