"""The cause of a failed trial among its ranks, and the error that a user gets for it."""

from __future__ import annotations

import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from autods.diagnosis.evidence import Evidence, HostUsage, RankError
from autods.diagnosis.trial_outcome import (
    blame_code_for_hang,
    explain_failure,
    make_input_error,
    wants_larger_batch,
)
from autods.types import Failed, OutOfMemory, Phase

ERROR_FIELDS = {field.name for field in fields(RankError)}


def evidence(rank: int, at_s: float, **values: Any) -> Evidence:
    """The end of a rank; some of the values are those of its error."""
    error = RankError(**{name: values.pop(name) for name in ERROR_FIELDS & values.keys()})
    return Evidence(
        **{"rank": rank, "at_s": at_s, "phase": "backward", "step": 0, "device": "cpu", "error": error, **values}
    )


def closed_by_peer(rank: int, at_s: float) -> Evidence:
    return evidence(
        rank, at_s, exit_code=1, types=("RuntimeError",), message="Connection closed by peer [127.0.0.1]:36"
    )


def out_of_memory(rank: int, at_s: float) -> Evidence:
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes."
    return evidence(rank, at_s, exit_code=1, types=("RuntimeError",), message=message)


def test_threads_that_find_no_memory_in_a_budget_are_out_of_memory() -> None:
    log = "terminate called without an active exception\nFatal Python error: Aborted\n"
    aborted = evidence(0, 1.0, phase="build", exit_code=-signal.SIGABRT, log_tail=log)
    limited = explain_failure([replace(aborted, limit_bytes=16 * 2**20)])
    assert isinstance(limited, OutOfMemory)
    assert (limited.tier, limited.action) == ("device", "leaner_rung")
    assert isinstance(explain_failure([aborted]), Failed)  # without a budget anything may have ended them


def test_an_emulated_card_lacks_what_is_left_of_its_limit() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 62.00 GiB is"
        " free. 15.51 GiB allowed;"
    )
    full = evidence(
        0,
        1.0,
        device="cuda",
        exit_code=1,
        types=("OutOfMemoryError",),
        message=message,
        free_bytes=GIB,
        limit_bytes=16 * GIB,
    )
    out = explain_failure([full])
    assert isinstance(out, OutOfMemory)
    assert (out.tier, out.free_bytes, out.missing_bytes) == ("device", GIB, GIB)


def stuck(rank: int, at_s: float, innermost: str) -> Evidence:
    stack = f'a warning\nCurrent thread 0x00007f (most recent call first):\n  File "{innermost}", line 3 in f\n'
    return evidence(rank, at_s, lost="stuck", log_tail=stack)


def test_out_of_memory_wins_over_an_earlier_closed_by_peer():
    outcome = explain_failure([closed_by_peer(0, 1.0), out_of_memory(1, 1.1), closed_by_peer(2, 0.9)])
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.rank, outcome.wanted_bytes) == (1, 1024)


def test_the_first_rank_that_ran_out_is_the_cause():
    outcome = explain_failure([out_of_memory(0, 2.0), out_of_memory(1, 1.0)])
    assert isinstance(outcome, OutOfMemory)
    assert outcome.rank == 1


def test_the_log_of_a_killed_rank_is_ignored():
    log = "warning: Connection reset by peer, retrying\nout of memory is near: std::bad_alloc"
    outcome = explain_failure([evidence(1, 1.0, exit_code=-signal.SIGKILL, log_tail=log), closed_by_peer(0, 0.9)])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.rank) == ("unknown", 1)  # nothing corroborates who sent it


def test_a_rank_waiting_in_a_collective_is_not_the_one_that_hangs():
    waiting = stuck(0, 1.0, "/lib/torch/distributed/distributed_c10d.py")
    hanging = stuck(1, 2.0, "/home/me/model.py")
    also_waiting = stuck(2, 1.5, "/lib/deepspeed/runtime/zero/partition_parameters.py")
    outcome = explain_failure([waiting, hanging, also_waiting])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.rank) == ("communication", 1)


def test_a_rank_waiting_for_its_card_is_not_the_one_that_hangs():
    """With NCCL a rank that waits for another one is in no collective: it waits for its card."""
    frame = '  File "/lib/torch/cuda/__init__.py", line 9 in synchronize\n'
    stack = f"Current thread 0x00007f (most recent call first):\n{frame}"
    waiting = evidence(0, 1.0, lost="stuck", log_tail=stack)
    outcome = explain_failure([waiting, stuck(1, 2.0, "/home/me/model.py")])
    assert isinstance(outcome, Failed)
    assert (outcome.rank, outcome.hung_at) == (1, "/home/me/model.py:3")


def test_a_rank_that_left_while_the_others_train_is_blamed():
    left = evidence(1, 1.0, lost="stuck", phase="done", step=7)
    outcome = explain_failure([left, stuck(0, 2.0, "/lib/torch/distributed/distributed_c10d.py")])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action, outcome.rank, outcome.hung_at) == ("user_code", "fix_code", 1, None)
    assert "ended in step 7" in outcome.evidence


def test_a_rank_that_is_done_waits_for_one_that_hangs():
    outcome = explain_failure([evidence(1, 1.0, lost="stuck", phase="done"), stuck(0, 2.0, "/home/me/model.py")])
    assert isinstance(outcome, Failed)
    assert (outcome.rank, outcome.hung_at) == (0, "/home/me/model.py:3")


def test_ranks_that_hang_at_their_end_may_be_tried_again():
    outcome = explain_failure([evidence(rank, 1.0, lost="stuck", phase="done") for rank in range(2)])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action) == ("communication", "retry")


def test_a_hang_in_the_users_code_has_its_line():
    outcome = explain_failure([stuck(1, 2.0, "/home/me/model.py")])
    assert isinstance(outcome, Failed)
    assert (outcome.hung_at, outcome.action) == ("/home/me/model.py:3", "retry")
    blamed = blame_code_for_hang(outcome)
    assert (blamed.failure, blamed.action) == ("user_code", "fix_code")
    assert blamed.evidence.startswith("/home/me/model.py:3: it hangs here: no rank moved for 0 s")


def test_input_without_a_terminal_is_the_users_code():
    waits = evidence(0, 1.0, exit_code=1, types=("EOFError",), message="EOF when reading a line", user_frame="/m.py:3")
    outcome = explain_failure([waits])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.evidence) == ("user_code", "/m.py:3: EOFError: EOF when reading a line")


def test_when_all_ranks_wait_the_oldest_heartbeat_is_named():
    outcome = explain_failure([stuck(0, 2.0, "/x/torch/distributed/c.py"), stuck(1, 1.0, "/x/torch/distributed/c.py")])
    assert isinstance(outcome, Failed)
    assert outcome.rank == 1


GIB = 2**30


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (HostUsage(limit_bytes=4 * GIB, least_free_bytes=GIB, group_kills=1), "OOM killer of its cgroup"),
        (HostUsage(limit_bytes=64 * GIB, least_free_bytes=GIB, machine_kills=1), "kernel's OOM killer"),
        (HostUsage(limit_bytes=64 * GIB, least_free_bytes=GIB // 4), "only 256.0 MiB of 64.0 GiB were free"),
    ],
)
def test_sigkill_is_host_memory_only_with_further_evidence(host, words):
    outcome = explain_failure([evidence(1, 1.0, exit_code=-signal.SIGKILL, host=host), closed_by_peer(0, 0.9)])
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.rank, outcome.action) == ("host", 1, "less_host_memory")
    assert words in outcome.evidence
    assert outcome.limit_bytes == host.limit_bytes


def test_a_killed_rank_on_a_node_with_memory_left_stays_unknown():
    host = HostUsage(limit_bytes=64 * GIB, least_free_bytes=40 * GIB)
    outcome = explain_failure([evidence(1, 1.0, exit_code=-signal.SIGKILL, host=host)])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action) == ("unknown", "retry")
    assert "dmesg" in outcome.advice


def test_an_exception_counts_although_an_oom_killer_struck():
    host = HostUsage(limit_bytes=64 * GIB, least_free_bytes=GIB, machine_kills=1)
    said = evidence(0, 1.0, exit_code=1, types=("ValueError",), message="bad value", user_frame="model.py:3", host=host)
    outcome = explain_failure([said])
    assert isinstance(outcome, Failed)
    assert outcome.failure == "user_code"


def refused(rank, at_s, host):
    return evidence(rank, at_s, exit_code=1, types=("MemoryError",), message="", device="cpu", host=host)


def test_a_refused_allocation_in_a_full_cgroup_is_host_memory():
    roomy = HostUsage(limit_bytes=64 * GIB, least_free_bytes=40 * GIB)
    full = HostUsage(limit_bytes=GIB, least_free_bytes=0)
    tiers = [explain_failure([refused(0, 1.0, host)]).tier for host in (roomy, full)]
    held = replace(refused(0, 1.0, full), free_bytes=GIB)  # of the rank's budget, which says nothing of the host
    assert explain_failure([held]).free_bytes is None
    assert tiers == ["device", "host"]  # a CPU rank's budget stands for the device


def test_a_full_budget_is_advised_as_a_full_device_is():
    host = HostUsage(limit_bytes=64 * GIB, least_free_bytes=40 * GIB)
    mapping = replace(refused(0, 1.0, host), error=RankError(types=("OSError",), message="[Errno 12] Cannot allocate"))
    for end in (refused(0, 1.0, host), replace(out_of_memory(0, 1.0), host=host), mapping):
        advice = explain_failure([end]).advice
        assert advice.startswith("the rank's memory budget is full: use a leaner rung, a smaller micro batch")
        assert advice.endswith("give each rank more memory (--gpu-memory)")
        assert "host" not in advice


def test_the_rank_that_the_cgroups_oom_killer_took_is_the_cause():
    full = HostUsage(limit_bytes=GIB, least_free_bytes=0, group_kills=1)
    outcome = explain_failure([refused(0, 1.0, full), evidence(1, 1.1, exit_code=-signal.SIGKILL, host=full)])
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.rank) == ("host", 1)


def test_a_worker_that_vanished_in_a_full_cgroup_is_host_memory():
    roomy = HostUsage(limit_bytes=64 * GIB, least_free_bytes=40 * GIB)
    full = HostUsage(limit_bytes=GIB, least_free_bytes=0, group_kills=1)
    gone = {"types": ("RuntimeError",), "message": "DataLoader worker (pid(s) 5582) exited unexpectedly"}
    outcomes = [explain_failure([evidence(1, 1.0, exit_code=1, host=host, **gone)]) for host in (roomy, full)]
    assert [outcome.action for outcome in outcomes] == ["retry", "less_host_memory"]


def test_a_bus_error_is_a_full_shm():
    outcome = explain_failure([evidence(1, 1.0, exit_code=-signal.SIGBUS)])
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.action) == ("shm", "fix_environment")
    assert "/dev/shm" in outcome.advice


def test_fragmentation_is_reported_with_its_setting():
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
    said = evidence(0, 1.0, device="cuda", types=("OutOfMemoryError",), message=message, idle_bytes=3 * GIB)
    outcome = explain_failure([said])
    assert isinstance(outcome, OutOfMemory)
    assert "expandable_segments:True" in outcome.advice


def test_tensors_freed_by_the_error_are_no_fragmentation():
    message = (
        "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 8.00 GiB of which 6.25 GiB is "
        "free. Of the allocated memory 1.25 GiB is allocated by PyTorch, and 1.94 MiB is reserved by PyTorch but "
        "unallocated."
    )
    said = evidence(0, 1.0, device="cuda", types=("OutOfMemoryError",), message=message, idle_bytes=2 * GIB)
    outcome = explain_failure([said])
    assert isinstance(outcome, OutOfMemory)
    assert "fragmentation" not in outcome.advice


def test_another_process_on_the_card_counts_once():
    message = (
        "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 8.00 GiB of which 10.00 MiB is "
        "free. Process 41 has 3.00 GiB memory in use. Including non-PyTorch memory, this process has 4.99 GiB memory "
        "in use."
    )
    traceback = f"Traceback (most recent call last):\ntorch.OutOfMemoryError: {message}"
    said = evidence(0, 1.0, device="cuda", types=("OutOfMemoryError",), message=message, traceback=traceback)
    assert "other processes hold 3.0 GiB of this card" in explain_failure([said]).advice


@pytest.mark.parametrize(("module", "failure"), [("transformers/models/gpt2", "user_code"), ("deepspeed", "config")])
def test_a_model_that_cannot_be_built_is_no_config_of_deepspeed(module: str, failure: str) -> None:
    message = "`embed_dim` must be divisible by num_heads (got `embed_dim`: 8 and `num_heads`: 3)."
    frame = f'Traceback (most recent call last):\n  File "/venv/site-packages/{module}/x.py", line 9, in __init__\n'
    said = evidence(0, 1.0, phase="build", types=("ValueError",), message=message, traceback=frame)
    outcome = explain_failure([said])
    assert isinstance(outcome, Failed)
    assert outcome.failure == failure


def test_a_failed_build_names_its_op():
    said = evidence(0, 1.0, types=("RuntimeError",), message="Error building extension 'cpu_adam'")
    outcome = explain_failure([said])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.op) == ("toolchain", "cpu_adam")


USERS_OWN = """Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/deepspeed/runtime/engine.py", line 1331, in _configure_distributed_model
    self.module.bfloat16()
    ^^^^^^^^^^^^^^^^^^^^^^
  File "/home/me/model.py", line 30, in _apply
    raise RuntimeError("made to fail")
RuntimeError: made to fail
"""


def test_an_exception_in_a_user_frame_below_deepspeed_is_user_code():
    said = evidence(
        1,
        1.0,
        types=("RuntimeError",),
        message="made to fail",
        traceback=USERS_OWN,
        user_frame="model.py:30",
        phase="init",
    )
    outcome = explain_failure([said])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action) == ("user_code", "fix_code")


def test_stack_has_the_frames_without_indent_and_carets():
    said = evidence(1, 1.0, types=("RuntimeError",), message="made to fail", traceback=USERS_OWN)
    assert said.stack.splitlines()[1:] == [
        "self.module.bfloat16()",
        'File "/home/me/model.py", line 30, in _apply',
        'raise RuntimeError("made to fail")',
    ]


@pytest.mark.parametrize(
    ("said", "wants"),
    [
        ("Expected more than 1 value per channel when training, got input size torch.Size([1, 64])", True),
        ("Actual (not effective) batch size must be > 1. KTO will not work properly", True),
        ("generation_batch_size (2) must be divisible by num_generations (8).", True),
        ("Expected input batch_size (8) to match target batch_size (4).", False),
        ("train_batch_size must be greater than 10", False),
    ],
)
def test_wants_larger_batch_ignores_other_words_about_batches(said: str, wants: bool):
    assert wants_larger_batch(said) is wants


def test_a_trainer_refusing_one_sample_wants_a_larger_batch():
    message = "Actual (not effective) batch size must be > 1. KTO will not work properly"
    outcome = explain_failure([evidence(0, 1.0, exit_code=1, types=("ValueError",), message=message)])
    assert isinstance(outcome, Failed)
    assert outcome.wants_larger_batch


LOG = Path("/out/logs/rank0.log")


def failed(**fields: Any) -> Failed:
    outcome = explain_failure([ended(**fields)])
    assert isinstance(outcome, Failed)
    return outcome


def ended(phase: Phase = "forward", **values: Any) -> Evidence:
    return evidence(0, 1.0, **{"phase": phase, "exit_code": 1, **values})


def test_a_line_in_the_workload_is_the_place() -> None:
    failure = failed(types=("ValueError",), message="no data", user_frame="/x/model.py:12")
    error = make_input_error(failure, "/x/model.py", LOG)
    assert (error.place, error.problem) == ("/x/model.py:12", "ValueError: no data")
    assert str(LOG) in str(error.hint)


def test_a_line_in_an_imported_module_is_the_place() -> None:
    failure = failed(types=("ValueError",), message="no data", user_frame="/x/data/read.py:7")
    assert make_input_error(failure, "/x/model.py", LOG).place == "/x/data/read.py:7"


def test_without_a_line_the_file_is_the_place() -> None:
    error = make_input_error(failed(contract="the loss is nan", hint="check it"), "/x/model.py", LOG)
    assert (error.place, error.problem) == ("/x/model.py", "the loss is nan")
    assert str(error.hint).startswith("check it; rank 0, forward")


def test_sys_exit_is_reported_with_its_line() -> None:
    failure = failed(types=("SystemExit",), message="7", user_frame="/x/model.py:3")
    assert failure.evidence == "/x/model.py:3: sys.exit(7) was called"


@pytest.mark.parametrize("phase", ["init", "step"])
def test_deepspeed_errors_outside_user_code_blame_the_config(phase: Phase) -> None:
    failure = failed(phase=phase, types=("TypeError",), message="'>' not supported")
    assert failure.action == "fix_config"
    assert make_input_error(failure, "/x/model.py", LOG).place == "DeepSpeed config"


def test_pydantic_message_is_cut_to_key_and_fault() -> None:
    message = (
        "1 validation error for DeepSpeedZeroConfig\nstage_3\n"
        "  Extra inputs are not permitted [type=extra_forbidden, input_value=1, input_type=int]\n    For further …"
    )
    failure = failed(phase="init", types=("ValidationError", "ValueError"), message=message)
    assert failure.evidence == "stage_3: Extra inputs are not permitted"


def test_a_rendezvous_that_fails_is_not_the_workloads_fault() -> None:
    assert failed(phase="rendezvous", types=("RuntimeError",), message="wrong store").action == "retry"


def test_no_memory_for_a_thread_is_out_of_device_memory_on_cpu() -> None:
    end = ended(phase="rendezvous", types=("RuntimeError",), message="Resource temporarily unavailable")
    outcome = explain_failure([end])
    assert isinstance(outcome, OutOfMemory)
    assert outcome.tier == "device"


def test_an_unwritable_result_blames_the_disk() -> None:
    assert failed(exit_code=98, phase="done").action == "fix_environment"


def test_a_rank_ended_by_a_real_time_signal_has_its_name() -> None:
    outcome = explain_failure([evidence(1, 1.0, exit_code=-40)])
    assert isinstance(outcome, Failed)
    assert "killed by SIGRTMIN+6" in outcome.evidence
