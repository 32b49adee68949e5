"""Ranks that die, stop, hang or fork: the right rank is named, and no process is left when the trial has ended.

tests/benchmarks/fault_table.py measures how soon that is.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from autods.errors import EnvironmentBroken
from autods.runner.cleanup import PREFIX, ROOT
from autods.runner.runner import RayRunner
from autods.types import Failed, Fit, OutOfMemory
from tests.support.fits import ignore, question
from tests.support.watching import (
    PHASES,
    Scene,
    a_trial,
    end_fit_in_phase,
    kill_in_phase,
    run_with_fault,
    start_fit,
    wait_for,
)


def line_of(code: str) -> int:
    """The number of the line of faulty.py that has this code."""
    lines = (Path(__file__).parent / "workloads" / "faulty.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if code in line)


# Fault: the failure that is reported, and words of its evidence.
REPORTED = {
    "SIGKILL": ("unknown", "killed by SIGKILL"),
    "SIGSEGV": ("user_code", f".py:{line_of('lambda: os.kill(')}: killed by SIGSEGV"),
    "SIGABRT": ("user_code", f".py:{line_of('lambda: os.kill(')}: killed by SIGABRT"),
    "os._exit(0)": ("user_code", "the process left with exit code 0 and no result"),
    "exception": ("user_code", "RuntimeError: made to fail"),
    "strays": ("user_code", "RuntimeError: made to fail"),
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Scene:
    return Scene.at(tmp_path_factory.mktemp("faulty"))


@pytest.fixture(scope="module")
def runner(ray, scene):
    with a_runner(scene) as runner:
        runner.survey()
        yield runner


def a_runner(scene: Scene) -> RayRunner:
    return RayRunner(question(str(scene.path), scene.out), ignore)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", REPORTED)
def test_a_rank_that_dies_is_named_and_nothing_is_left(runner, scene, fault, phase):
    seen = run_with_fault(runner, scene, fault, phase)
    kind, words = REPORTED[fault]
    assert isinstance(seen.outcome, Failed), seen.outcome
    assert (seen.outcome.failure, seen.outcome.rank, seen.outcome.phase) == (kind, 1, phase)
    assert words in seen.outcome.evidence
    assert seen.left == []


@pytest.mark.parametrize("rung", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("phase", PHASES)
def test_memory_that_ran_out_on_one_rank_is_the_cause(runner, scene, phase, rung):
    seen = run_with_fault(runner, scene, "out of memory", phase, rung=rung)
    assert isinstance(seen.outcome, OutOfMemory), seen.outcome
    assert (seen.outcome.tier, seen.outcome.rank, seen.outcome.phase) == ("device", 1, phase)
    assert seen.outcome.wanted_bytes == 64 * 2**30
    assert seen.left == []


@pytest.mark.parametrize("phase", PHASES)
def test_rank_0_may_die_though_it_serves_the_rendezvous(runner, scene, phase):
    seen = run_with_fault(runner, scene, "SIGKILL", phase, rung="zero3", rank=0)
    assert isinstance(seen.outcome, Failed), seen.outcome
    assert (seen.outcome.failure, seen.outcome.rank, seen.outcome.phase) == ("unknown", 0, phase)
    assert seen.left == []


@pytest.mark.parametrize("phase", ["build", "backward"])
def test_a_rank_that_stays_stopped_is_named(runner, scene, phase):
    seen = run_with_fault(runner, scene, "SIGSTOP", phase)
    assert isinstance(seen.outcome, Failed), seen.outcome
    assert (seen.outcome.failure, seen.outcome.rank, seen.outcome.phase) == ("infrastructure", 1, phase)
    assert "SIGSTOP" in seen.outcome.evidence
    assert seen.left == []


@pytest.mark.parametrize(("phase", "rung"), [("forward", "zero1"), ("step", "zero3")])
def test_the_rank_that_makes_the_others_wait_is_named(runner, scene, phase, rung, monkeypatch):
    profile = runner.settings.profile
    short = replace(profile, limits=replace(profile.limits, stall_s=5.0))
    monkeypatch.setattr(runner, "settings", replace(runner.settings, profile=short))
    seen = run_with_fault(runner, scene, "hang", phase, rung=rung)
    assert isinstance(seen.outcome, Failed), seen.outcome
    assert (seen.outcome.failure, seen.outcome.rank, seen.outcome.phase) == ("communication", 1, phase)
    assert "no rank moved for" in seen.outcome.evidence
    log = Path(runner.settings.out / "logs" / f"001-{rung}" / "rank1.log").read_text()
    assert "in hang" in log  # its stack
    assert seen.left == []


def test_the_same_zygote_runs_trials_after_all_faults(runner, scene):
    (scene.out / "fault.json").unlink(missing_ok=True)
    assert isinstance(runner.run(a_trial(), id=2).outcome, Fit)


def test_a_killed_zygote_takes_its_ranks_and_is_replaced(runner, scene):
    seen, _ = kill_in_phase(runner, scene, "backward", lambda zygote: zygote)
    assert isinstance(seen.outcome, Failed), seen.outcome
    assert (seen.outcome.failure, seen.outcome.rank, seen.outcome.phase) == ("infrastructure", -1, "backward")
    assert "SIGKILL" in seen.outcome.evidence
    assert seen.left == []
    (scene.out / "fault.json").unlink()
    assert isinstance(runner.run(a_trial(), id=2).outcome, Fit)


def test_a_killed_agent_takes_everything_and_ends_the_fit(ray, tmp_path):
    scene = Scene.at(tmp_path)
    with a_runner(scene) as runner:
        runner.survey()
        pid = ray.get(runner.workers.nodes[0].agent.__ray_call__.remote(lambda node: os.getpid()))
        _, error = kill_in_phase(runner, scene, "backward", lambda zygote: psutil.Process(pid))
        assert isinstance(error, EnvironmentBroken)
        wait_for(lambda: not scene.find_leftovers(zygote=False), 60)


def test_a_killed_driver_leaves_nothing(tmp_path):
    scene = Scene.at(tmp_path)
    code, seen = end_fit_in_phase(scene, "backward", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert seen.left == []
    wait_for(lambda: not list(ROOT.glob(f"{PREFIX}{scene.driver}-*")), 60)


def test_a_fit_interrupted_in_a_forecast_leaves_no_simulation(tmp_path):
    scene = Scene.at(tmp_path)
    driver = start_fit(scene, "--gpu-memory", "96MiB", forecast=True)  # so little that nothing obviously fits
    try:
        wait_for(lambda: len(scene.simulators()) > 1, 120)  # the prepared process and an engine
        os.kill(driver.pid, signal.SIGINT)
        wait_for(lambda: not scene.simulators(), 60)
        driver.wait(60)
    finally:
        driver.kill()
        driver.wait()


def test_a_driver_killed_while_its_zygote_loads_leaves_nothing(tmp_path):
    scene = Scene.at(tmp_path)
    driver = start_fit(scene)
    try:
        wait_for(scene.family, 120)
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not scene.find_leftovers(zygote=False), 60)


def test_an_interrupted_process_group_leaves_nothing(tmp_path):
    scene = Scene.at(tmp_path)
    code, seen = end_fit_in_phase(scene, "forward", signal.SIGINT, group=True)
    said = (scene.out / "said.txt").read_text()
    assert code == 130, said
    assert seen.left == []
    assert "go on with: python -m autods fit" in said
    assert "Traceback" not in said
    assert "GCS" not in said
    assert (scene.out / "journal.jsonl").read_text().count("\n") >= 2
