"""The rows of configs/forecast: read, checked, and counted where they hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.catalogue import Links, Machine
from autods.errors import InputError
from autods.forecast.predict.memory_model import estimate_outside_bytes, read_overheads
from autods.forecast.values import EngineSpec, Interval

HEAD = """
[spread]
cuda = 0.02
cpu = 0.02
[least]
cuda = 0.01
cpu = 0.01
"""
ROW = """
[[constant]]
name = "made up"
tier = "device"
device = "cuda"
held = "inside"
source = "this test"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "constants.toml"
    path.write_text(text)
    return path


def ask(stage: int = 2, **zero: object) -> EngineSpec:
    return EngineSpec(
        rung="any", ds_config={"zero_optimization": {"stage": stage, **zero}}, world_size=2, ranks_per_node=2,
        device_bytes=1,
    )  # fmt: skip


def on_card(engine: EngineSpec, **machine: Any) -> EngineSpec:
    return replace(engine, machine=Machine(name="card", title="card", device_bytes=1, **machine))


def test_a_row_of_bytes_and_a_row_of_a_share_add_up(tmp_path: Path) -> None:
    rows = ROW + 'bytes = ["1MiB", "2MiB", "4MiB"]\n' + ROW + 'share_of = "activations"\nshare = [0.0, 0.5, 1.0]\n'
    overheads = read_overheads(written(tmp_path, HEAD + rows))
    assert overheads.sum(ask(), "device", "inside", {"activations": 100}) == Interval(
        low_bytes=2**20, peak_bytes=2**21 + 50, high_bytes=2**22 + 100
    )
    assert overheads.sum(ask(), "host", "inside", {"activations": 100}) == Interval()


@pytest.mark.parametrize(
    ("engine", "counts"),
    [(ask(2), False), (ask(3), True), (ask(2, overlap_comm=True), True), (ask(3, overlap_comm=False), False)],
)
def test_overlap_is_deepspeeds_default_at_stage_3_only(tmp_path: Path, engine: EngineSpec, counts: bool) -> None:
    row = ROW + 'setting = "overlap_comm"\nbytes = ["1MiB", "1MiB", "1MiB"]\n'
    overheads = read_overheads(written(tmp_path, HEAD + row))
    assert bool(overheads.sum(engine, "device", "inside", {}).peak_bytes) == counts


def test_a_row_can_begin_at_a_stage_and_a_world_size(tmp_path: Path) -> None:
    row = ROW + 'least_stage = 3\nleast_world_size = 2\nbytes = ["1MiB", "1MiB", "1MiB"]\n'
    overheads = read_overheads(written(tmp_path, HEAD + row))
    assert overheads.sum(ask(2), "device", "inside", {}) == Interval()
    assert overheads.sum(ask(3), "device", "inside", {}).peak_bytes == 2**20
    assert overheads.sum(replace(ask(3), world_size=1), "device", "inside", {}) == Interval()


@pytest.mark.parametrize(("capability", "expected"), [((7, 0), 1), ((8, 9), 1), ((9, 0), 2), ((12, 0), 2), (None, 2)])
def test_rows_differ_by_compute_capability(tmp_path: Path, capability: tuple[int, int] | None, expected: int) -> None:
    rows = ROW + 'below_capability = "9.0"\nbytes = ["1MiB", "1MiB", "1MiB"]\n'
    rows += ROW + 'least_capability = "9.0"\nbytes = ["2MiB", "2MiB", "2MiB"]\n'
    overheads = read_overheads(written(tmp_path, HEAD + rows))
    engine = on_card(ask(), driver_capability=capability)
    assert overheads.sum(engine, "device", "inside", {}).peak_bytes == expected * 2**20


@pytest.mark.parametrize(("nvlink", "expected"), [(True, 2), (False, 1), (None, 2)])
def test_rows_differ_by_the_link_between_cards(tmp_path: Path, nvlink: bool | None, expected: int) -> None:
    rows = ROW + 'nvlink = false\nbytes = ["1MiB", "1MiB", "1MiB"]\n'
    rows += ROW + 'nvlink = true\nbytes = ["2MiB", "2MiB", "2MiB"]\n'
    overheads = read_overheads(written(tmp_path, HEAD + rows))
    links = (
        nvlink
        if nvlink is None
        else Links(over_pcie=not nvlink, between_gpus="", between_gpus_gb_per_s=1, to_host="", to_host_gb_per_s=1)
    )
    engine = on_card(ask(), links=links)
    assert overheads.sum(engine, "device", "inside", {}).peak_bytes == expected * 2**20


def test_a_row_counts_for_each_further_communicator(tmp_path: Path) -> None:
    row = ROW + 'each = "further_communicator"\nbytes = ["1MiB", "1MiB", "1MiB"]\n'
    overheads = read_overheads(written(tmp_path, HEAD + row))
    assert overheads.sum(ask(), "device", "inside", {"further_communicators": 3}).peak_bytes == 3 * 2**20
    assert overheads.sum(ask(), "device", "inside", {}).peak_bytes == 0


def test_torchs_workspaces_are_larger_from_hopper_on() -> None:
    amounts = {"activations": 0, "reduce_bucket": 0}
    sizes = [
        read_overheads().sum(on_card(replace(ask(), world_size=1), driver_capability=card), "device", "inside", amounts)
        for card in ((8, 0), (9, 0))
    ]
    assert [size.peak_bytes for size in sizes] == [2 * 8_519_680, 2 * 32 * 2**20]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + ROW, "'made up' needs three bytes or three shares"),
        (HEAD + ROW + 'bytes = ["1MiB", "2MiB"]', "'made up' needs three bytes or three shares"),
        (HEAD + ROW + 'bytes = ["4MiB", "2MiB", "8MiB"]', "not in order"),
        (HEAD + ROW + 'bytes = ["few", "2MiB", "8MiB"]', "'few' is not a size"),
        (HEAD + ROW + 'least_capability = "90"\nbytes = ["0", "0", "0"]', "'90' is not of the form"),
        (HEAD + ROW + "shares = [0, 1, 2]", "unknown key 'shares'"),
        (HEAD.replace("cpu = 0.02", "") + ROW + 'bytes = ["0", "0", "0"]', "spread needs a number"),
    ],
)
def test_a_wrong_row_is_said_with_the_files_name(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        read_overheads(written(tmp_path, text))
    assert "constants.toml" in str(raised.value)


def test_a_context_and_a_communicator_are_taken_before_init() -> None:
    alone, several = (estimate_outside_bytes(replace(ask(), world_size=ranks)) for ranks in (1, 2))
    assert alone == several == (751 + 600) * 2**20  # DeepSpeed communicates with a single rank, too
    assert estimate_outside_bytes(replace(ask(), device="cpu")) == 0
