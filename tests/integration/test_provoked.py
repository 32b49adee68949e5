"""Failures provoked in real trials: the right diagnosis, the right rank, and the walk's next move is the right one."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autods.runner.runner import RayRunner
from autods.tuner.candidates import list_candidates
from autods.tuner.ladder_walk import WalkResult, walk_ladder
from autods.types import Failed, Fit, Outcome, OutOfMemory, Record, Steps, Trial
from tests.support.contexts import make_context
from tests.support.fits import ignore, question
from tests.support.memory_groups import memory_group
from tests.support.watching import Scene

pytestmark = pytest.mark.usefixtures("ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What rank 1 meets in every trial, what shall be said of it, and what the walk shall do next.

    then: the rungs tried one after the other, of ddp, zero1, zero2-offload, zero3 and zero3-offload.
    """

    fault: str
    phase: str
    kind: str
    action: str
    then: tuple[str, ...]
    tier: str | None = None
    words: str = ""


EVERY = ("ddp", "zero1", "zero2-offload", "zero3", "zero3-offload")
TWICE = tuple(name for name in EVERY for _ in range(2))
ONCE = ("ddp",)

CASES = (
    Case(fault="out of memory", phase="backward", kind="out_of_memory", tier="device", action="leaner_rung",
         then=EVERY),
    Case(fault="SIGKILL", phase="step", kind="unknown", action="retry", then=TWICE, words="not by autods"),
    Case(fault="a crash in C", phase="forward", kind="user_code", action="fix_code", then=ONCE, words="SIGSEGV"),
    Case(fault="SIGSTOP", phase="build", kind="infrastructure", action="retry", then=TWICE, words="SIGSTOP"),
    Case(fault="exception", phase="forward", kind="user_code", action="fix_code", then=ONCE, words="made to fail"),
    Case(fault="wrong shape", phase="forward", kind="user_code", action="fix_code", then=ONCE, words="shapes"),
    Case(fault="missing package", phase="build", kind="user_code", action="fix_code", then=ONCE, words="flash_attn"),
    Case(fault="sys.exit", phase="build", kind="user_code", action="fix_code", then=ONCE, words="sys.exit(3)"),
    Case(fault="os._exit(0)", phase="step", kind="user_code", action="fix_code", then=ONCE,
         words="the process left with exit code 0"),
    Case(fault="bus error", phase="build", kind="out_of_memory", tier="shm", action="fix_environment", then=ONCE),
    Case(fault="full disk", phase="step", kind="out_of_memory", tier="nvme", action="fix_environment", then=ONCE,
         words="No space left"),
    Case(fault="DataLoader worker killed", phase="build", kind="unknown", action="retry", then=TWICE,
         words="DataLoader worker"),  # torch names the signal only where its handler comes first
)  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory) -> Iterator[Scene]:
    scene = Scene.at(tmp_path_factory.mktemp("provoked"))
    scene.out.mkdir()
    with small_disk(scene.out / "small"):
        yield scene


@pytest.fixture(scope="module")
def runner(ray, scene):
    no_ops = {"optimizer": {"params": {"torch_adam": True}}}  # so that nothing has to be built
    with RayRunner(question(str(scene.path), scene.out, ladder=EVERY, base_config=no_ops), ignore) as runner:
        runner.survey()
        yield runner


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_it_is_diagnosed_right_and_the_walk_makes_the_right_move(runner, scene, case):
    if case.fault in ("bus error", "full disk"):
        need_small_disk(scene)
    walked, tried = climb(runner, scene, case.fault, case.phase)
    assert tried == case.then, walked.records[-1]
    for record in walked.records:
        assert_said(record.outcome, case)
    assert (walked.stopped is not None) == (case.then == ONCE)


@pytest.mark.parametrize("fault", ["until killed", "DataLoader worker until killed"])
def test_a_cgroup_oom_kill_is_out_of_host_memory(runner, scene, fault):
    with cgroup_of(scene.zygote().pid, limit_bytes=2**29):
        walked, tried = climb(runner, scene, fault, "build")
    assert tried == ("ddp", "zero1", "zero2-offload", "zero3"), "\n".join(map(str, walked.records))  # none cut short
    for record in walked.records:
        outcome = record.outcome
        assert isinstance(outcome, OutOfMemory), outcome
        assert (outcome.tier, outcome.rank, outcome.phase) == ("host", 1, "build")
        assert re.search("killed by|exited unexpectedly", outcome.evidence, re.IGNORECASE)  # torch says either
        assert outcome.limit_bytes == 2**29
    reason = {skip.rung: skip.reason for skip in walked.skipped}["zero3-offload"]
    assert reason == "it needs as much host memory as zero2-offload, which ran out of it"


def test_a_failing_compiler_disables_only_rungs_that_need_its_op(ray, tmp_path, monkeypatch):
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\necho 'internal compiler error: Illegal instruction' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("AUTODS_CACHE", str(tmp_path / "cache"))
    ladder = ("zero2-offload", "zero3-offload-param", "zero3-offload")
    with RayRunner(question("tiny.py", tmp_path / "out", ladder=ladder), ignore) as runner:
        walked, tried = walk_on(runner)
    # The optimizer of zero3-offload-param is on the device.
    assert tried == ("zero2-offload", "zero3-offload-param")
    broken = walked.records[0].outcome
    assert isinstance(broken, Failed)
    assert (broken.failure, broken.action, broken.op) == ("toolchain", "fix_environment", "cpu_adam")
    assert walked.winner is not None
    assert walked.winner.trial.rung == "zero3-offload-param"


def test_a_config_that_deepspeed_refuses_stops_the_walk(runner, scene, monkeypatch):
    (scene.out / "fault.json").unlink(missing_ok=True)
    base = {"scheduler": {"type": "NoSuchSchedule", "params": {}}}
    refused = question(str(scene.path), scene.out, ladder=EVERY, base_config=base)
    monkeypatch.setattr(runner, "settings", refused)
    walked, tried = walk_on(runner)
    assert tried == ("ddp", "zero1")  # another stage might have taken it
    assert walked.stopped is not None
    outcome = walked.stopped.outcome
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action, outcome.phase) == ("config", "fix_config", "init")


def test_a_rank_that_lost_its_connections_is_the_cause(runner, scene):
    scene.choose_fault("closed connections", "forward")
    outcome = runner.run(Trial(rung="zero1", knobs=walk_knobs(runner), purpose="walk"), id=1).outcome
    assert isinstance(outcome, Failed)
    assert (outcome.failure, outcome.action) in {("communication", "retry"), ("secondary", "retry")}


def assert_said(outcome: Outcome, case: Case) -> None:
    assert not isinstance(outcome, Fit)
    said = "out_of_memory" if isinstance(outcome, OutOfMemory) else outcome.failure
    assert (said, outcome.rank, outcome.phase, outcome.action) == (case.kind, 1, case.phase, case.action), outcome
    assert (outcome.tier if isinstance(outcome, OutOfMemory) else None) == case.tier
    assert case.words in outcome.evidence


def climb(runner: RayRunner, scene: Scene, fault: str, phase: str) -> tuple[WalkResult, tuple[str, ...]]:
    scene.choose_fault(fault, phase)
    try:
        return walk_on(runner)
    finally:
        (scene.out / "fault.json").unlink()


def walk_on(runner: RayRunner) -> tuple[WalkResult, tuple[str, ...]]:
    """The real walk with real trials, and the rungs in the order of asking."""
    facts, op_problems = runner.survey()
    tried: list[str] = []

    def run(trial: Trial) -> Record:
        tried.append(trial.rung)
        return runner.run(trial, id=len(tried))

    context = replace(make_context(run, profile={"walk": Steps()}), settings=runner.settings, facts=facts)
    walked = walk_ladder(list_candidates(runner.settings, facts, op_problems), context)
    return walked, tuple(tried)


def walk_knobs(runner: RayRunner):
    facts, op_problems = runner.survey()
    return list_candidates(runner.settings, facts, op_problems)[0].knobs


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 4 MiB, where this machine lets us mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    try:
        yield
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(folder)], check=True)


def need_small_disk(scene: Scene) -> None:
    if not (scene.out / "small").is_mount():
        pytest.skip("a file system cannot be mounted here")
    for left in (scene.out / "small").iterdir():
        left.unlink()


@contextlib.contextmanager
def cgroup_of(pid: int, *, limit_bytes: int) -> Iterator[None]:
    """That process, and what it forks from now on, in a memory cgroup of its own."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(memory_group(limit_bytes=limit_bytes, pids=[pid]))
        except OSError as error:
            pytest.skip(f"a memory cgroup cannot be made here: {error}")
        yield
