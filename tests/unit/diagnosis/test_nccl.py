"""What a job on cards reports when NCCL fails: the first cause, not what its watchdog says of the others."""

from __future__ import annotations

from typing import Any

import autods
from autods.rank.job import RankJob
from autods.runner.node_messages import RankExit
from autods.runner.outcome import find_failure
from autods.types import Failed, OutOfMemory, WorkloadSource
from tests.support.ends import rank_exit, report_of

SOURCE = WorkloadSource(kind="file", path="/home/me/model.py", name="model", digest="abc")
JOB = RankJob(job="train", source=SOURCE, device="cuda", folder="/f", scratch="/s", world_size=2, local_ranks=(0, 1))

WATCHDOG = """\
[rank{rank}]:[E1122 01:10:14.210000000 ProcessGroupNCCL.cpp:683] [Rank {rank}] Watchdog caught collective operation \
timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE, NumelIn=500000, NumelOut=500000, Timeout(ms)=600000) ran for 600055 \
milliseconds before timing out.
[rank{rank}]:[E1122 01:10:14.410000000 ProcessGroupNCCL.cpp:1816] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] \
Exception (either an error or timeout) detected by watchdog at work: 41, last enqueued work: 41, last completed: 40.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with exception: [Rank \
{rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41, OpType=ALLREDUCE)
"""
OUT = (
    "CUDA out of memory. Tried to allocate 1.91 GiB. GPU 1 has a total capacity of 15.77 GiB of which 1.02 GiB is "
    "free. Including non-PyTorch memory, this process has 14.74 GiB memory in use. Of the allocated memory 13.02 GiB "
    "is allocated by PyTorch, and 612.31 MiB is reserved by PyTorch but unallocated."
)


def end(rank: int, *, at_s: float, exit: int | None = None, log: str = "", **error: Any) -> RankExit:
    """A rank that ended by a signal, or with what it raised."""
    return rank_exit(rank, error=error or None, phase="backward", step=1, at_s=at_s, exit_code=exit, log_tail=log)


def raised(rank: int, kind: str, message: str, *, at_s: float, log: str = "") -> RankExit:
    return end(rank, at_s=at_s, log=log, types=[kind, "RuntimeError", "Exception"], message=message)


def outcome(*ends: RankExit) -> Any:
    return find_failure([report_of(*ends)], JOB)


def test_out_of_memory_wins_over_an_earlier_watchdog_of_a_peer() -> None:
    aborted = end(0, at_s=10.0, exit=-6, log=WATCHDOG.format(rank=0))
    found = outcome(aborted, raised(1, "OutOfMemoryError", OUT, at_s=10.2))
    assert isinstance(found, OutOfMemory)
    assert (found.tier, found.rank) == ("device", 1)
    assert found.wanted_bytes == int(1.91 * 2**30)


def test_nccl_without_memory_is_a_device_shortage() -> None:
    said = (
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.27.7\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'"
    )
    found = outcome(raised(0, "DistBackendError", said, at_s=1.0))
    assert isinstance(found, OutOfMemory)
    assert found.tier == "device"


def test_nccl_warning_in_the_log_explains_its_exception() -> None:
    said = "NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
    log = "node-1:812:990 [0] include/alloc.h:178 NCCL WARN Cuda failure 'out of memory'\n"
    found = outcome(raised(0, "DistBackendError", said, at_s=1.0, log=log))
    assert isinstance(found, OutOfMemory)
    assert found.tier == "device"


def test_a_watchdog_timeout_alone_is_no_shortage() -> None:
    found = outcome(end(0, at_s=1.0, exit=-6, log=WATCHDOG.format(rank=0)))
    assert isinstance(found, Failed)
    assert found.failure in ("secondary", "communication")


def test_a_cuda_error_is_the_cause_of_its_peers_nccl_error() -> None:
    peer = "NCCL communicator was aborted on rank 0. Original reason for failure was: remote process exited"
    found = outcome(
        raised(0, "DistBackendError", peer, at_s=1.0),
        raised(1, "AcceleratorError", "CUDA error: an illegal memory access was encountered", at_s=1.1),
    )
    assert isinstance(found, Failed)
    assert found.rank == 1
    assert "illegal memory access" in found.evidence


def test_a_crash_stays_a_crash_when_its_log_mentions_peers() -> None:
    crashed = end(1, at_s=1.0, exit=-11, log=WATCHDOG.format(rank=1) + "Fatal Python error: Segmentation fault\n")
    found = outcome(crashed, end(0, at_s=1.2, exit=-6, log=WATCHDOG.format(rank=0)))
    assert isinstance(found, Failed)
    assert found.rank == 1
    assert "SIGSEGV" in found.evidence


def test_a_lost_store_after_a_lost_peer_is_secondary() -> None:
    lost = "[rank9]:[W TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=91): failed to recv, got 0 bytes\n"
    store = "RendezvousConnectionError: The connection to the C10d store has failed."
    assert autods.diagnose(f"{lost}{store}").kind == "secondary"
    assert autods.diagnose(store).kind == "communication"


def test_the_cuda_error_that_nccl_names_is_the_cause() -> None:
    log = "DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.26.2\nLast error:\n"
    assert autods.diagnose(f"{log}Cuda failure 'uncorrectable ECC error encountered'").kind == "infrastructure"
    assert autods.diagnose(f"{log}Cuda failure 'unknown error'").kind == "unknown"
