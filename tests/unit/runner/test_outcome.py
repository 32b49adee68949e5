"""From what the ranks of a trial report to its outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autods.diagnosis.evidence import HostUsage
from autods.errors import EnvironmentBroken, InputError
from autods.rank.comparable_losses import Incomparable
from autods.rank.record import describe_error
from autods.runner.node_messages import RankExit, StoreFailed, ZygoteDied
from autods.runner.outcome import find_failure, judge_trial, make_error, may_need_all_ranks
from autods.types import CardUse, Examined, Failed, Fit, OutOfMemory
from tests.support.ends import JOB, outcome, rank_exit, report_of

PASSED = {
    "batch_shape": [2, 64],
    "draws": 16,
    "evaluated": True,
    "checkpoint_bytes": 1000,
    "save_s": 1.0,
    "load_s": 0.5,
    "gathered": True,
    "restored": True,
    "left_out": [],
}


def passed(rank: int, examined: dict[str, Any] | None) -> RankExit:
    timing = {"step_s": [0.5], "steps_s": 1.0, "losses": [2.0, 1.0], "build_s": 0.1, "init_s": 0.1}
    peaks = {"device": 100, "host": 50, "pinned": 0}
    return rank_exit(rank, result={**timing, "peaks": peaks, "examined": examined})


def test_a_trial_without_an_exam_has_none() -> None:
    fits = outcome(passed(0, None), passed(1, None))
    assert isinstance(fits, Fit)
    assert fits.examined is None


def test_an_exam_has_the_longest_batch_and_the_slowest_save() -> None:
    slow = {**PASSED, "batch_shape": [2, 96], "save_s": 3.0, "left_out": ["no room"]}
    fits = outcome(passed(0, PASSED), passed(1, slow))
    assert isinstance(fits, Fit)
    assert fits.examined == Examined(
        batch_shape=(2, 96),
        draws=16,
        evaluated=True,
        checkpoint_bytes=1000,
        save_s=3.0,
        load_s=0.5,
        gathered=True,
        restored=True,
        left_out=("no room",),
    )


def test_one_rank_that_is_not_restored_is_enough() -> None:
    fits = outcome(passed(0, PASSED), passed(1, {**PASSED, "restored": False}))
    assert isinstance(fits, Fit)
    assert fits.examined is not None
    assert fits.examined.restored is False


def ran_with(rank: int, **peaks: int) -> RankExit:
    timing = {"step_s": [0.5], "steps_s": 1.0, "losses": [2.0], "build_s": 0.1, "init_s": 0.1}
    return rank_exit(rank, result={**timing, "peaks": {"device": 100, "host": 50, "pinned": 0, **peaks}})


def test_the_headroom_is_judged_without_what_the_allocator_caches() -> None:
    shares = {"device_beside": 10, "device_allocated": 60}
    fits = outcome(ran_with(0, device_in_use=80, **shares), ran_with(1, device=110, device_in_use=75, **shares))
    assert isinstance(fits, Fit)
    assert fits.card == CardUse(allocated_bytes=60, reserved_bytes=100, nvml_bytes=110, in_use_bytes=80)
    assert (fits.memory["device"].peak_bytes, fits.device_peak_bytes) == (110, 80)


def test_the_host_peak_is_the_ranks_or_what_the_monitor_saw() -> None:
    host = HostUsage(limit_bytes=2**30, least_free_bytes=2**29, peak_rss_bytes={"0": 200, "1": 130})
    ranks = (ran_with(0, host_offset=-100), ran_with(1, host_offset=-100))
    fits = judge_trial([report_of(*ranks, host=host)], JOB, wall_s=9.0, tokens_per_sample=None, host_bytes=None)
    assert isinstance(fits, Fit)
    assert fits.memory["host"].peak_bytes == (200 - 100) + 50


def test_losses_that_cannot_be_compared_need_no_action() -> None:
    error = describe_error(Incomparable("samples differ in shape", hint="pad every sample"), "/model.py")
    refused = rank_exit(1, error=error, phase="build", step=0)
    other = rank_exit(0, exit_code=-9, killed_by_us=True)
    failed = outcome(refused, other)
    assert isinstance(failed, Failed)
    assert failed.action == "nothing"
    assert failed.evidence == "samples differ in shape"
    assert failed.advice == "pad every sample"


def test_a_zygote_killed_by_an_oom_killer_ran_out_of_host_memory() -> None:
    host = HostUsage(limit_bytes=2**30, least_free_bytes=2**29, group_kills=1)
    died = ZygoteDied(how="killed by SIGKILL", phase="backward", step=2, host=host)
    out = find_failure([died], JOB)
    assert isinstance(out, OutOfMemory)
    assert (out.tier, out.rank, out.phase, out.limit_bytes) == ("host", -1, "backward", 2**30)


def test_a_zygote_killed_for_no_known_reason_is_tried_again() -> None:
    host = HostUsage(limit_bytes=2**30, least_free_bytes=2**29)
    lost = find_failure([ZygoteDied(how="killed by SIGKILL", host=host)], JOB)
    assert isinstance(lost, Failed)
    assert (lost.failure, lost.action) == ("infrastructure", "retry")


def test_a_store_that_cannot_listen_is_the_environments_fault() -> None:
    failed = find_failure([StoreFailed(reason="10.0.0.1: Cannot assign requested address")], JOB)
    assert isinstance(failed, Failed)
    assert failed.action == "fix_environment"
    assert "10.0.0.1" in failed.evidence


def test_ranks_that_only_we_killed_name_the_reason() -> None:
    killed = report_of(rank_exit(0, exit_code=-9, killed_by_us=True), killed_because="the driver is gone")
    failed = find_failure([killed], JOB)
    assert isinstance(failed, Failed)
    assert failed.evidence == "the driver is gone"


def test_a_rank_that_outlives_sigkill_ends_the_fit() -> None:
    """It holds memory, so that no further trial could be trusted."""
    text = "node-3: process 7 (python) in state D (disk sleep), in rpc_wait_bit_killable"
    report = report_of(rank_exit(0, killed_by_us=True, phase="step"), survivors=text)
    failure = find_failure([report], JOB)
    assert isinstance(failure, Failed)
    assert (failure.action, failure.phase) == ("fix_environment", "step")
    assert failure.evidence == f"a killed rank is still there after 60 s on {text}"


def test_a_survey_that_failed_names_the_log_of_its_rank() -> None:
    broken = Failed(
        failure="toolchain",
        rank=1,
        phase="build",
        evidence="no compiler",
        action="fix_environment",
        advice="install g++",
    )
    with pytest.raises(EnvironmentBroken, match=r"no compiler\n  install g\+\+ \(log: /logs/rank1\.log\)"):
        raise make_error(broken, JOB)


def test_a_model_that_fits_into_no_memory_is_wrong_input() -> None:
    full = OutOfMemory(tier="host", rank=-1, phase="build", evidence="killed")
    with pytest.raises(InputError, match="does not fit into this machine's memory"):
        raise make_error(full, JOB)


@pytest.mark.parametrize(
    ("kind", "error", "needed"),
    [
        ("script", AssertionError("world size 1 is not a multiple of 2 stages"), True),
        ("script", KeyError("loss"), False),
        ("file", AssertionError("world size 1 is not a multiple of 2 stages"), False),
    ],
)
def test_a_script_that_checks_the_world_size_needs_all_ranks(kind: Any, error: Exception, needed: bool) -> None:
    job = replace(JOB, source=replace(JOB.source, kind=kind))
    assert may_need_all_ranks([report_of(rank_exit(0, error=describe_error(error, "model.py")))], job) is needed
