"""The environment of ranks: what reaches their node from the fit's process, and what their zygote adds."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.devices.cuda import CudaDevice
from autods.errors import InputError
from autods.rank.job import RankJob
from autods.runner import agent, environment
from autods.runner.environment import (
    check_group_timeout,
    choose_cores,
    choose_exported,
    join_node_environment,
    rank_environment,
    zygote_environment,
)
from autods.types import WorkloadSource
from tests.support.scripted_nvml import four

SOURCE = WorkloadSource(kind="file", path="/home/me/model.py", name="model", digest="abc")


def start_environment(device: str, monkeypatch: pytest.MonkeyPatch, **users: str) -> dict[str, str]:
    """Return the environment in which a zygote is started."""
    seen: dict[str, str] = {}

    class Process:
        pid = 1

        def __init__(self, argv: Any, *, env: dict[str, str], **rest: Any) -> None:
            seen.update(env)

    monkeypatch.setattr(agent.subprocess, "Popen", Process)
    agent.start_zygote(SOURCE, device, 0, "/dev/null", users).connection.close()
    return seen


@pytest.mark.parametrize(
    ("device", "given", "expected"),
    [
        ("cuda", {}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ("cuda", {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True"}),
        ("cpu", {}, {}),
    ],
)
def test_ranks_of_expandable_knobs_get_the_allocators_setting(
    monkeypatch: pytest.MonkeyPatch, device: str, given: dict[str, str], expected: dict[str, str]
) -> None:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    job = RankJob(job="train", source=SOURCE, device=device, folder="/f", scratch="/s", expandable=True)

    def read(job: RankJob) -> dict[str, str]:
        return {name: value for name, value in rank_environment(job, 0, 29500).items() if name in names}

    assert read(job) == expected
    assert read(replace(job, expandable=False)) == given


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
TWO_NODES = {0: [(0,), (1,)], 1: [(2,), (3,)]}


def choose_on_two_nodes(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[tuple[int, ...]]:
    """Return the processors of each rank of a job with states on the host, on a machine with two NUMA nodes."""
    monkeypatch.setattr(environment, "read_numa_cores", lambda: TWO_NODES)
    monkeypatch.setattr(CudaDevice, "find_numa_nodes", lambda self: (1, 0, 0))
    options = {"device": "cuda", "local_ranks": (0, 1), "world_size": 2, "ds_config": OFFLOAD, "threads": 2, **changes}
    job = RankJob(job="train", source=SOURCE, folder="/f", scratch="/s", **options)
    return [choose_cores(job, slot) for slot in range(len(job.local_ranks))]


def test_ranks_with_states_on_the_host_keep_to_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_on_two_nodes(monkeypatch) == [(2, 3), (0, 1)]


@pytest.mark.parametrize(
    "changes",
    [
        {"ds_config": {"zero_optimization": {"stage": 2}}},
        {"threads": 3},
        {"local_ranks": (0,), "world_size": 1},
        {"device": "cpu"},
    ],
    ids=["nothing on the host", "more threads than cores", "one rank", "processors"],
)
def test_ranks_are_not_bound_without_need(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    assert set(choose_on_two_nodes(monkeypatch, **changes)) == {()}


def test_the_users_own_binding_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_AFFINITY", "compact")
    assert choose_on_two_nodes(monkeypatch) == [(), ()]


@pytest.mark.parametrize(("users", "minutes"), [({}, 240), ({"DEEPSPEED_TIMEOUT": "5"}, 5)])
def test_groups_wait_longer_than_a_trials_limits(
    monkeypatch: pytest.MonkeyPatch, users: dict[str, str], minutes: int
) -> None:
    assert start_environment("cpu", monkeypatch, **users)["DEEPSPEED_TIMEOUT"] == str(minutes)


@pytest.mark.parametrize("minutes", ["30m", "", "1.5", "0", "-5"])
def test_a_timeout_that_deepspeed_cannot_read_is_wrong_input(minutes: str) -> None:
    with pytest.raises(InputError, match=rf"DEEPSPEED_TIMEOUT={minutes}: is no whole number above 0\n  give the min"):
        check_group_timeout({"DEEPSPEED_TIMEOUT": minutes})
    check_group_timeout({"DEEPSPEED_TIMEOUT": "90"})
    check_group_timeout({})


def test_a_cuda_zygote_numbers_cards_like_nvml_and_logs_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = start_environment("cuda", monkeypatch, PATH="/bin", PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert environment["DS_ACCELERATOR"] == "cuda"  # else DeepSpeed counts cards, which can initialise CUDA
    assert "MALLOC_ARENA_MAX" not in environment


def test_the_users_settings_for_cards_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")  # as Ray gives them to the actor
    environment = start_environment(
        "cuda", monkeypatch, NCCL_DEBUG="INFO", CUDA_DEVICE_ORDER="FASTEST_FIRST", OMP_NUM_THREADS="6",
        CUDA_VISIBLE_DEVICES="0,1,2,3", TOKENIZERS_PARALLELISM="true",
    )  # fmt: skip
    assert (environment["NCCL_DEBUG"], environment["CUDA_DEVICE_ORDER"]) == ("INFO", "FASTEST_FIRST")
    assert environment["TOKENIZERS_PARALLELISM"] == "true"
    assert environment["OMP_NUM_THREADS"] == "1"  # the zygote forks; a rank gets those six
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"


@pytest.mark.parametrize(("users", "expected"), [({"CUDA_VISIBLE_DEVICES": "3,10,1"}, "3,10,1"), ({}, "1,3,10")])
def test_ranks_have_the_cards_in_the_users_order(
    users: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "10,1,3")  # Ray keeps no order
    assert start_environment("cuda", monkeypatch, **users)["CUDA_VISIBLE_DEVICES"] == expected


def test_cards_named_by_uuid_are_given_to_ranks_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", four())  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-d,GPU-b")
    environment = start_environment(
        "cuda", monkeypatch, CUDA_DEVICE_ORDER="FASTEST_FIRST", CUDA_VISIBLE_DEVICES="GPU-d,GPU-b"
    )
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["CUDA_DEVICE_ORDER"]) == ("3,1", "PCI_BUS_ID")


def test_a_zygote_of_cpu_ranks_sees_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environment = start_environment("cpu", monkeypatch, CUDA_VISIBLE_DEVICES="0", MALLOC_ARENA_MAX="8")
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["DS_ACCELERATOR"], environment["MALLOC_ARENA_MAX"]) == (
        "",
        "cpu",
        "1",
    )


def test_onednn_keeps_no_kernels_of_experts_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("ONEDNN_MAX_CPU_ISA", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [start_environment("cpu", monkeypatch)[name] for name in names] == ["AVX512_CORE", "0"]
    assert start_environment("cpu", monkeypatch, ONEDNN_MAX_CPU_ISA="DEFAULT")["ONEDNN_MAX_CPU_ISA"] == "DEFAULT"


def test_the_gpus_that_ray_gave_the_agent_are_the_zygotes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert zygote_environment("cuda", {"CUDA_VISIBLE_DEVICES": "0"})["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert zygote_environment("cpu", {})["CUDA_VISIBLE_DEVICES"] == ""


def test_a_package_that_ray_brought_is_found_by_the_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = Path("/ray/runtime_resources/py_modules_files/_ray_pkg_1")
    monkeypatch.setattr(environment, "__file__", str(brought / "autods/runner/environment.py"))
    assert zygote_environment("cpu", {"PYTHONPATH": "/own"})["PYTHONPATH"] == f"{brought}:/own"


def test_a_node_gets_what_training_reads_and_no_secrets() -> None:
    here = {
        "NCCL_SOCKET_IFNAME": "ib0", "PYTHONPATH": "/code", "TORCH_LOGS": "dynamo", "HF_HOME": "/hf", "DATA": "/data",
        "WANDB_MODE": "offline", "HF_TOKEN": "hf_1", "MLFLOW_TRACKING_PASSWORD": "2", "AWS_SECRET_ACCESS_KEY": "3",
        "TOKENIZERS_PARALLELISM": "true", "HOME": "/root", "TMPDIR": "/scratch/1", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    usual = {"NCCL_SOCKET_IFNAME", "PYTHONPATH", "TORCH_LOGS", "HF_HOME", "TOKENIZERS_PARALLELISM"}
    assert set(choose_exported(here, ())) == usual
    assert set(choose_exported(here, ("DATA", "WANDB_*", "HF_TOKEN"))) == usual | {"DATA", "WANDB_MODE", "HF_TOKEN"}


def test_a_node_keeps_its_own_variables_but_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.os, "environ", {"PATH": "/node/bin", "RAY_JOB_ID": "1", "NCCL_DEBUG": "WARN"})
    assert join_node_environment({"NCCL_DEBUG": "INFO"}) == {"PATH": "/node/bin", "NCCL_DEBUG": "INFO"}


def test_what_torch_compiles_is_kept_for_the_next_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTODS_CACHE", "/cache")
    assert zygote_environment("cpu", {})["TORCHINDUCTOR_CACHE_DIR"] == "/cache/torchinductor"
    assert zygote_environment("cpu", {"TORCHINDUCTOR_CACHE_DIR": "/mine"})["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def job(device: str, ranks: int = 2) -> RankJob:
    return RankJob(
        job="train", source=SOURCE, device=device, folder="/f", scratch="/s", world_size=ranks,
        local_ranks=tuple(range(ranks)),
    )  # fmt: skip


def test_a_rank_gets_its_share_of_the_cores_or_the_users_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autods.rank.job.count_cores", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the zygote's
    assert rank_environment(job("cuda"), 0, 1)["OMP_NUM_THREADS"] == "8"
    assert rank_environment(job("cpu", 32), 0, 1)["OMP_NUM_THREADS"] == "1"
    assert rank_environment(replace(job("cuda"), threads=4), 0, 1)["MKL_NUM_THREADS"] == "4"


def test_nccl_finds_its_network_and_gloo_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's address may be that of a slow network for management."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("autods.runner.environment.find_interface", lambda address: "eth0")
    part = replace(job("cuda"), master_address="10.0.0.1", node_address="10.0.0.2")
    variables = rank_environment(part, 0, 1)
    assert "NCCL_SOCKET_IFNAME" not in variables
    assert variables["GLOO_SOCKET_IFNAME"] == "eth0"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib1")
    variables = rank_environment(part, 0, 1)
    assert (variables["NCCL_SOCKET_IFNAME"], variables["GLOO_SOCKET_IFNAME"]) == ("ib0", "ib1")


def test_a_rank_in_a_job_of_slurm_has_what_srun_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    job = RankJob(
        job="train", source=SOURCE, device="cpu", folder="/f", scratch="/s",
        local_ranks=(4, 5), world_size=8, node_rank=2,
    )  # fmt: skip
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert not [name for name in rank_environment(job, 1, 29500).keys() - os.environ.keys() if "SLURM" in name]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")  # of the job's shell, or of the node's Ray
    told = rank_environment(job, 1, 29500)
    names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS")
    assert [told[name] for name in names] == ["5", "1", "2", "8", "8"]
