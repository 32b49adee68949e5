"""Signatures are rows of data: each row's example is that row's, and no row takes another's."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from autods.diagnosis.lines import LineFilter
from autods.diagnosis.messages import parse_exception_type
from autods.diagnosis.signatures import (
    ERROR_LINE,
    Signature,
    find_confidence,
    find_signature,
    read_signatures,
    read_toml,
)

# By row, each a text or a text and the frames of its traceback.
EXAMPLES = tomllib.loads(Path(__file__).with_name("examples.toml").read_text(encoding="utf-8"))
ROWS = {f"{row.file}/{row.name}": row for row in read_signatures()}
CASES = [
    pytest.param(
        f"{file}/{name}", *((example, "") if isinstance(example, str) else example), id=f"{file}/{name}-{number}"
    )
    for file, rows in EXAMPLES.items()
    for name, examples in rows.items()
    for number, example in enumerate(examples)
]


@pytest.mark.parametrize(("name", "text", "stack"), CASES)
def test_each_example_matches_its_own_row_first(name: str, text: str, stack: str) -> None:
    type = parse_exception_type(text) or (ERROR_LINE if ERROR_LINE in ROWS[name].types else "")
    mentioned = name.startswith("pressure/")  # what a line says of memory that was short, and not that something failed
    assert find_signature(text, type=type, stack=stack, passing=mentioned) is ROWS[name]


@pytest.mark.parametrize(("name", "text", "stack"), CASES)
def test_the_line_filter_keeps_every_example(name: str, text: str, stack: str) -> None:
    assert LineFilter().keeps(text.encode())


def test_no_line_of_the_rows_is_over_200_characters() -> None:
    for path in resources.files("autods.diagnosis").joinpath("signatures").iterdir():
        assert max(map(len, path.read_text(encoding="utf-8").splitlines())) <= 200, path.name


def test_every_row_has_an_example_and_names_its_source() -> None:
    assert len(ROWS) == len(read_signatures())
    assert set(ROWS) == {f"{file}/{name}" for file, rows in EXAMPLES.items() for name in rows}
    assert all(row.source for row in ROWS.values())


@pytest.mark.parametrize("row", read_signatures(), ids=lambda row: f"{row.file}/{row.name}")
def test_every_row_has_words_or_exception_types(row: Signature) -> None:
    assert row.phrases or row.words or row.types
    assert row.pattern or not row.words


def test_memory_rows_have_a_tier_and_others_have_none() -> None:
    for row in read_signatures():
        assert (row.tier is not None) == (row.kind in ("out_of_memory", "memory_pressure")), row.name


@pytest.mark.parametrize("name", ["BloomPreTrainedModel", "RoomImpulse", "zoom"])
def test_oom_inside_a_name_is_not_about_memory(name: str) -> None:
    said = f"ImportError: cannot import name '{name}' from 'transformers'"
    row = find_signature(said, type="ImportError", stack="")
    assert row is None or "memory" not in row.name


def test_a_download_without_network_is_no_rendezvous_failure() -> None:
    said = "urllib.error.URLError: <urlopen error [Errno -2] Name or service not known>"
    row = find_signature(said, type="URLError", stack="")
    assert row is not None
    assert row.name == "remote-service"


@pytest.mark.parametrize(
    "said",
    [
        "ValueError: buffer_size should be at least 4096",
        "RuntimeError: could not open store",
        "TokenizerError: token is invalid: '<unk>'",
        "ConfigMissing: pcie bandwidth config missing",
        "KeyError: could not parse entry 'exited with exit code 0' of the manifest",
    ],
)
def test_words_in_the_users_own_exception_are_theirs(said: str) -> None:
    row = find_signature(said, type=said.partition(":")[0], by_user=True)
    assert row is not None
    assert row.kind == "user_code"


def test_a_recompute_of_other_sizes_is_the_users_code() -> None:
    said = "CheckpointError: different\nsaved metadata: {'shape': Size([8])}\nrecomputed metadata: {'shape': Size([9])}"
    row = find_signature(said, type="CheckpointError")
    assert row is not None
    assert row.kind == "user_code"


def test_no_kernel_or_scheduler_raises_a_value_error() -> None:
    said = "ValueError: Killed process 3 (python) total-vm:12kB, anon-rss:3kB is no known status"
    row = find_signature(said, type="ValueError")
    assert row is None or row.emitter not in ("kernel", "scheduler")


def test_confidence_is_a_share_with_its_counts() -> None:
    table = read_toml("confidence")
    assert table["cause raised"]["cases"] >= 100
    for grounds, row in table.items():
        assert 0 < row["confidence"] < 1, grounds
        assert row.get("right", 0) <= row.get("cases", 0)
    assert find_confidence("grounds that no log had") == table["other"]["confidence"]
    assert find_confidence("cause raised") > find_confidence("exit code")
