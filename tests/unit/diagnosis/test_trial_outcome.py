"""Of several ranks that ended badly, which one is the cause."""

from __future__ import annotations

import signal

import pytest

from autods.diagnosis import Evidence, HostMemory, explain_failure, wants_larger_batch
from autods.types import Failed, OutOfMemory


def evidence(rank: int, at_s: float, **said: object) -> Evidence:
    return Evidence(**{"rank": rank, "at_s": at_s, "phase": "backward", "step": 0, "device": "cpu", **said})


def closed_by_peer(rank: int, at_s: float) -> Evidence:
    return evidence(rank, at_s, exit=1, types=("RuntimeError",), message="Connection closed by peer [127.0.0.1]:36")


def out_of_memory(rank: int, at_s: float) -> Evidence:
    message = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes."
    return evidence(rank, at_s, exit=1, types=("RuntimeError",), message=message)


def stuck(rank: int, at_s: float, innermost: str) -> Evidence:
    stack = f'a warning\nCurrent thread 0x00007f (most recent call first):\n  File "{innermost}", line 3 in f\n'
    return evidence(rank, at_s, lost="stuck", log_tail=stack)


def test_closed_by_peer_never_wins_over_a_rank_that_ran_out_even_if_it_was_written_first():
    outcome = explain_failure([closed_by_peer(0, 1.0), out_of_memory(1, 1.1), closed_by_peer(2, 0.9)])
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.rank, outcome.wanted_bytes) == (1, 1024)


def test_of_two_ranks_that_ran_out_the_first_is_the_cause():
    outcome = explain_failure([out_of_memory(0, 2.0), out_of_memory(1, 1.0)])
    assert isinstance(outcome, OutOfMemory)
    assert outcome.rank == 1


def test_a_killed_rank_is_not_judged_by_what_its_log_says():
    log = "warning: Connection reset by peer, retrying\nout of memory is near: std::bad_alloc"
    outcome = explain_failure([evidence(1, 1.0, exit=-signal.SIGKILL, log_tail=log), closed_by_peer(0, 0.9)])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.rank) == ("unknown", 1)  # nothing corroborates who sent it


def test_a_rank_that_waits_in_a_collective_is_not_the_one_that_hangs_though_it_beat_first():
    waiting = stuck(0, 1.0, "/lib/torch/distributed/distributed_c10d.py")
    hanging = stuck(1, 2.0, "/home/me/model.py")
    also_waiting = stuck(2, 1.5, "/lib/deepspeed/runtime/zero/partition_parameters.py")
    outcome = explain_failure([waiting, hanging, also_waiting])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.rank) == ("communication", 1)


def test_when_all_wait_the_oldest_beat_is_named():
    outcome = explain_failure([stuck(0, 2.0, "/x/torch/distributed/c.py"), stuck(1, 1.0, "/x/torch/distributed/c.py")])
    assert isinstance(outcome, Failed)
    assert outcome.rank == 1


GIB = 2**30


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (HostMemory(limit_bytes=4 * GIB, least_free_bytes=GIB, group_kills=1), "OOM killer of its cgroup"),
        (HostMemory(limit_bytes=64 * GIB, least_free_bytes=GIB, machine_kills=1), "kernel's OOM killer"),
        (HostMemory(limit_bytes=64 * GIB, least_free_bytes=GIB // 4), "only 256.0 MiB of 64.0 GiB were free"),
    ],
)
def test_a_killed_rank_ran_out_of_host_memory_when_something_else_than_the_signal_says_so(host, words):
    outcome = explain_failure([evidence(1, 1.0, exit=-signal.SIGKILL, host=host), closed_by_peer(0, 0.9)])
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.rank, outcome.action) == ("host", 1, "less_host_memory")
    assert words in outcome.evidence
    assert outcome.limit_bytes == host.limit_bytes


def test_a_killed_rank_on_a_node_with_memory_left_stays_unknown():
    host = HostMemory(limit_bytes=64 * GIB, least_free_bytes=40 * GIB)
    outcome = explain_failure([evidence(1, 1.0, exit=-signal.SIGKILL, host=host)])
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action) == ("unknown", "retry")
    assert "dmesg" in outcome.advice


def test_an_exception_is_judged_by_itself_although_the_killer_struck_elsewhere():
    host = HostMemory(limit_bytes=64 * GIB, least_free_bytes=GIB, machine_kills=1)
    said = evidence(0, 1.0, exit=1, types=("ValueError",), message="bad value", user_frame="model.py:3", host=host)
    outcome = explain_failure([said])
    assert isinstance(outcome, Failed)
    assert outcome.failure == "user_code"


def test_a_bus_error_is_a_full_shm_and_no_rung_helps():
    outcome = explain_failure([evidence(1, 1.0, exit=-signal.SIGBUS)])
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.tier, outcome.action) == ("shm", "fix_environment")
    assert "/dev/shm" in outcome.advice


def test_memory_that_the_allocator_keeps_in_pieces_is_said_with_the_knob():
    message = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"
    said = evidence(0, 1.0, device="cuda", types=("OutOfMemoryError",), message=message, idle_bytes=3 * GIB)
    outcome = explain_failure([said])
    assert isinstance(outcome, OutOfMemory)
    assert "expandable_segments:True" in outcome.advice


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


def test_what_the_users_own_frame_raises_below_deepspeed_is_the_users():
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


def test_frames_are_read_as_those_of_a_log():
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
def test_what_asks_for_more_samples_is_told_from_other_words_about_batches(said: str, wants: bool):
    assert wants_larger_batch(said) is wants


def test_a_trainer_that_refuses_a_batch_of_one_wants_a_larger_one_whatever_kind_of_failure_that_is():
    message = "Actual (not effective) batch size must be > 1. KTO will not work properly"
    outcome = explain_failure([evidence(0, 1.0, exit=1, types=("ValueError",), message=message)])
    assert isinstance(outcome, Failed)
    assert outcome.wants_larger_batch
