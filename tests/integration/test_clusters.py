"""Fits and a run on a Ray cluster of this machine: a raylet of several is killed, or the nodes have IPv6 alone."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.clusters import begin_fit, cluster, find_raylet, read_outcomes, short_config
from tests.support.namespaces import in_new_namespace, why_no_namespaces
from tests.support.watching import Scene, find_pids, read_command, wait_for, wait_until_gone

GATED = Path(__file__).parent / "workloads" / "gated.py"
STEPS, GLOBAL_BATCH = 10, 8


def test_a_fit_that_loses_a_node_goes_on_beside_another(tmp_path):
    """Two nodes for one fit, one for the other, which after the loss waits for the first to end. The head has none."""
    wide, lone = (Scene.at(made(tmp_path / name)) for name in ("wide", "lone"))
    lone.choose_fault("hang", "forward")
    with cluster(0, 2, 2, 2) as address:
        first = begun(wide, address, "--gpus", "4", "--nodes", "2")
        other = begun(lone, address, "--gpus", "2")
        struck = lone.wait_for_fault()
        (lone.out / "fault.json").unlink()
        ranks = {process.pid for process in lone.zygote().children()}
        find_raylet(struck["pid"]).kill()
        wait_until_gone(ranks, 60)
        assert struck["pid"] in ranks
        codes = first.wait(200), other.wait(200)
    assert codes == (0, 0), said(wide) + said(lone)
    assert {one["kind"] for one in read_outcomes(wide.out)} == {"fit"}
    lost, *after = read_outcomes(lone.out)
    assert (lost["failure"], lost["rank"]) == ("infrastructure", -1)
    assert "was lost" in lost["evidence"]
    assert {one["kind"] for one in after} == {"fit"}
    assert "2 ranks on each of 127.0.0.1, 127.0.0.1" in said(wide)


def test_a_run_that_loses_a_node_goes_on_with_fewer_ranks(tmp_path):
    """Samples are held back after step 7 until a node is killed; the last checkpoint then is that of step 4."""
    out = tmp_path / "out"
    with cluster(0, 1, 1) as address:
        driver = begun_run(tmp_path, address)
        try:
            wait_for(lambda: driver.poll() is not None or 5 in steps_of(out, 1), 300)
            assert driver.poll() is None, printed(tmp_path)
            processes = family_of(tmp_path)
            zygote = next(pid for pid in processes if psutil.Process(pid).ppid() not in processes)
            processes = {zygote, *(child.pid for child in psutil.Process(zygote).children())}
            find_raylet(zygote).kill()
            wait_until_gone(processes, 60)
            (tmp_path / "data" / "open").touch()
            code = driver.wait(300)
        finally:
            driver.kill()
            driver.wait()
    assert code == 0, printed(tmp_path)
    report = json.loads((out / "run.json").read_text())
    first, last = report["attempts"][0], report["attempts"][-1]
    assert (report["status"], report["step"], report["global_batch"]) == ("done", STEPS, GLOBAL_BATCH)
    assert (first["world_size"], last["world_size"], last["first_step"]) == (2, 1, 4)
    assert "world size 1 instead of 2" in printed(tmp_path)
    assert_same_samples(out, last["number"])


def test_a_run_of_two_nodes_needs_no_ipv4(tmp_path, monkeypatch):
    """The rank of the second node is killed after step 5, while the samples of step 8 are held back."""
    if (why := why_no_namespaces()) is not None:
        pytest.skip(why)
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    nodes = [sys.executable, "-m", "tests.support.namespaces", "2", "1"]
    run = begun_run(tmp_path, "ADDRESS", inside=in_new_namespace(nodes))
    try:
        wait_for(lambda: run.poll() is not None or 5 in steps_of(tmp_path / "out", 1), 300)
        assert run.poll() is None, printed(tmp_path)
        ranks = [pid for pid in family_of(tmp_path) if psutil.Process(pid).ppid() in family_of(tmp_path)]
        (rank,) = (pid for pid in ranks if "--node_ip_address=fd00:77::2" in find_raylet(pid).cmdline())
        os.kill(rank, signal.SIGKILL)
        (tmp_path / "data" / "open").touch()
        code = run.wait(300)
    finally:
        run.terminate()
        run.wait()
    assert code == 0, printed(tmp_path)
    assert "1 ranks on each of fd00:77::1, fd00:77::2" in printed(tmp_path)
    report = json.loads((tmp_path / "out" / "run.json").read_text())
    first, last = report["attempts"]
    assert (report["status"], report["step"], report["rescues"]) == ("done", STEPS, 1)
    assert (first["world_size"], last["world_size"], last["first_step"]) == (2, 2, 4)
    assert_same_samples(tmp_path / "out", last["number"])


def begun_run(folder: Path, address: str, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a run of two ranks on two nodes, in `folder`/out, with samples that are held back after step 7."""
    workload, data = folder / "gated.py", made(folder / "data")
    workload.write_text(GATED.read_text())
    ranks = ("--device", "cpu", "--address", address, "--nodes", "2", "--gpus", "2", "--gpu-memory", "1GiB")
    search = ("--no-forecast", "--ladder", "zero1", "--config", short_config(folder))
    batch = ("--global-batch", str(GLOBAL_BATCH), "--steps", str(STEPS), "--checkpoint-every", "4")
    command = [*inside, sys.executable, "-m", "autods", "run", str(workload), *ranks, *search, *batch]
    command += ["--data", str(data), "--out", str(folder / "out")]
    with open(folder / "said.txt", "wb") as said:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)


def family_of(folder: Path) -> set[int]:
    """Pids of the run's zygotes and ranks: they share a command line."""
    return {pid for pid in find_pids("autods.runner.zygote") if f'"{folder}/gated.py"' in read_command(pid)}


def printed(folder: Path) -> str:
    return (folder / "said.txt").read_text()


def assert_same_samples(out: Path, second_attempt: int) -> None:
    """Every step of both attempts has its own samples, and step 5 the same loss in both."""
    before, after = steps_of(out, 1), steps_of(out, second_attempt)
    assert sorted(after) == list(range(5, STEPS + 1))
    assert after[5]["loss"] == pytest.approx(before[5]["loss"], rel=1e-2)  # bf16, which rounds to 3 digits
    for step, row in (before | after).items():
        assert row["samples"] == [(step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH]


def steps_of(out: Path, attempt: int) -> dict[int, dict[str, Any]]:
    file = out / "attempts" / str(attempt) / "steps.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row for row in rows if "loss" in row}


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def begun(scene: Scene, address: str, *asked: str) -> subprocess.Popen[bytes]:
    more = ("--gpu-memory", "1GiB", "--ladder", "zero1", "--config", short_config(scene.out.parent))
    return begin_fit(scene.path, scene.out, "--address", address, *asked, *more)


def said(scene: Scene) -> str:
    return (scene.out / "said.txt").read_text()
