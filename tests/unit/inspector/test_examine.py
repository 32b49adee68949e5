"""Before the first trial: only what breaks or slows the rungs of this ladder, with the remedy."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from autods import api
from autods.devices import Finding
from autods.errors import AutodsError, InputError
from autods.events import Event, Listener, Note
from autods.inspector import examine
from autods.inspector.examine import check_ladder, format_warning
from autods.rank.record import MeasureResult, Reading
from autods.report.results.doctor import Check
from autods.runner.health import Preflight
from autods.system.host import Hardware
from tests.support.machines import SOURCE, a_machine
from tests.support.settings import fit_settings

UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def warnings(
    options: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    *,
    built: bool = True,
    compiler: bool = True,
    locked: int = resource.RLIM_INFINITY,
    shared: Path = Path("/"),
    file_system: str = "ext4",
) -> dict[str, Check]:
    settings = fit_settings(SOURCE, hardware=a_machine(gpus=4), **(options or {}))
    checks = check_ladder(
        settings,
        variables or {},
        is_built=lambda op: built,
        which=lambda name: f"/usr/bin/{name}" if compiler or name == "ninja" else None,
        shared=shared,
        read_limit=lambda number: (locked, locked) if number == resource.RLIMIT_MEMLOCK else UNLIMITED,
        may_lock=lambda: False,
        file_system=lambda folder: file_system,
    )
    return {check.name: check for check in checks}


def test_a_machine_that_lacks_nothing_gives_no_line() -> None:
    assert warnings() == {}


def test_without_a_compiler_the_rungs_that_need_an_op_are_named() -> None:
    line = format_warning(warnings(built=False, compiler=False)["compiler"])
    assert line.startswith("compiler: g++ is not installed, so cpu_adam cannot be built for zero2-offload")
    assert line.endswith("(apt-get install g++)")
    assert "zero3-nvme" not in line


def test_what_is_built_already_needs_no_compiler() -> None:
    assert warnings({"forecast": False}, compiler=False) == {}
    assert "forecasts" in warnings(compiler=False)["compiler"].result


def test_a_ladder_without_offload_needs_no_ops() -> None:
    assert warnings({"ladder": ("zero2", "zero3"), "forecast": False}, built=False, compiler=False) == {}


@pytest.mark.parametrize("nvme", [False, True])
def test_libaio_and_locked_memory_matter_with_nvme_only(
    nvme: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "_HEADER_FOLDERS", ())
    options = {"nvme_path": str(tmp_path)} if nvme else {}
    found = warnings(options, built=False, locked=65536)
    assert set(found) == ({"libaio", "locked memory"} if nvme else set())
    if nvme:
        assert "cannot be built for zero3-nvme" in found["libaio"].result
        (tmp_path / "libaio.h").write_text("")
        assert "libaio" not in warnings(options, {"CPATH": f"/gone:{tmp_path}"}, built=False)


def test_a_folder_for_nvme_in_memory_is_a_line(tmp_path: Path) -> None:
    (check,) = warnings({"nvme_path": str(tmp_path)}, file_system="tmpfs").values()
    assert format_warning(check).startswith(f"{tmp_path}: it is host memory (tmpfs), so offloading to it saves none")


def test_variables_of_nccl_matter_to_several_cards_only() -> None:
    slow = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "CUDA_LAUNCH_BLOCKING": "1"}
    assert set(warnings({}, slow)) == {"NCCL_P2P_DISABLE=1", "CUDA_LAUNCH_BLOCKING=1"}
    assert set(warnings({"gpus": 1}, slow)) == {"CUDA_LAUNCH_BLOCKING=1"}
    cpu = {"device": "cpu", "gpus": 2, "gpu_memory": "1GiB"}
    assert warnings(cpu, slow) == {}
    assert set(warnings(cpu, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})) == {"TORCH_DISTRIBUTED_DEBUG=DETAIL"}


def test_of_a_cluster_only_the_variables_are_checked() -> None:
    cluster = {"address": "head:6379", "nodes": 2, "gpus": 8}
    assert set(warnings(cluster, {"NCCL_IB_DISABLE": "1"}, built=False, compiler=False)) == {"NCCL_IB_DISABLE=1"}


def test_shared_memory_that_is_too_small_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = shutil.disk_usage(tmp_path)._replace(total=64 * 2**20, free=32 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: small)
    (check,) = warnings(shared=tmp_path).values()
    assert format_warning(check).startswith(f"{tmp_path}: 32.0 MiB free of 64.0 MiB; NCCL, Ray and DataLoader")


def test_a_fit_says_it_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Event] = []
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setattr("autods.tuner.fit.fit", lambda settings, listen: list(heard))
    settings = fit_settings(SOURCE, hardware=a_machine(gpus=4))
    assert Note(text="CUDA_LAUNCH_BLOCKING=1: the CPU waits for every kernel (unset CUDA_LAUNCH_BLOCKING)") in (
        api.FIT.run(settings, heard.append)
    )


class Ranks:
    """Ranks that find this before they measure nothing, or that cannot start."""

    def __init__(self, finding: Finding, error: AutodsError | None = None) -> None:
        self.finding, self.error = finding, error

    @contextmanager
    def open(self, hardware: Hardware, nvme_path: Path | None, listen: Listener) -> Iterator[Ranks]:
        if self.error is not None:
            raise self.error
        yield self

    def preflight(self) -> Preflight:
        return Preflight(findings=(self.finding,))

    def measure(self) -> MeasureResult:
        return MeasureResult(readings=(), left_out=("NVMe: no folder was named",))


HOT = Finding(text="card 1 (H100) is throttled: too hot", remedy="see the fans")


def test_what_slowed_the_ranks_stands_beside_what_they_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path))
    monkeypatch.setattr(examine, "open_ranks", Ranks(HOT).open)
    settings = examine.DoctorSettings(hardware=a_machine(gpus=2), machine_file=tmp_path / "mine.toml")
    checks = {check.name: check for check in examine.measure_machine(settings, lambda event: None)}
    assert (checks["although"].status, checks["although"].result) == ("warning", HOT.text)
    assert f"# although {HOT.text}\n" in (tmp_path / "mine.toml").read_text()


def test_what_an_earlier_measurement_had_stays_with_a_comment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path))
    ranks = Ranks(HOT)
    disk = Reading(kind="nvme", name="read", size=2**30, seconds=0.5, bytes=2**30)
    monkeypatch.setattr(ranks, "measure", lambda: MeasureResult(readings=(disk,), left_out=()))
    monkeypatch.setattr(examine, "open_ranks", ranks.open)
    settings = examine.DoctorSettings(hardware=a_machine(gpus=2), machine_file=tmp_path / "mine.toml")
    list(examine.measure_machine(settings, lambda event: None))
    monkeypatch.setattr(examine, "open_ranks", Ranks(HOT).open)
    list(examine.measure_machine(settings, lambda event: None))
    text = (tmp_path / "mine.toml").read_text()
    assert "nvme_gb_per_s = 2.1475" in text
    assert "# NVMe: kept from an earlier measurement\n" in text


def test_a_folder_that_is_not_there_leaves_the_other_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    error = InputError("is not a folder that can be written", place="--nvme-path /x", hint="create it first")
    monkeypatch.setattr(examine, "open_ranks", Ranks(HOT, error).open)
    settings = examine.DoctorSettings(hardware=a_machine(gpus=2))
    (check,) = examine.measure_machine(settings, lambda event: None)
    assert (check.status, check.remedy) == ("broken", "create it first")
    assert check.result == "--nvme-path /x: is not a folder that can be written"
    assert "plan" not in check.stops
