"""Fits and a run on a Ray cluster of this machine: a raylet of several is killed, or the nodes have IPv6 alone."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
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
    out, data = tmp_path / "out", made(tmp_path / "data")
    workload = tmp_path / "gated.py"
    workload.write_text(GATED.read_text())
    with cluster(0, 1, 1) as address, open(tmp_path / "said.txt", "wb") as said:
        ranks = ("--device", "cpu", "--address", address, "--nodes", "2", "--gpus", "2", "--gpu-memory", "1GiB")
        search = ("--no-forecast", "--ladder", "zero1", "--config", short_config(tmp_path))
        batch = ("--global-batch", str(GLOBAL_BATCH), "--steps", str(STEPS), "--checkpoint-every", "4")
        command = [sys.executable, "-m", "autods", "run", str(workload), *ranks, *search, *batch]
        command += ["--data", str(data), "--out", str(out)]
        driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            wait_for(lambda: driver.poll() is not None or 5 in steps_of(out, 1), 300)
            assert driver.poll() is None, (tmp_path / "said.txt").read_text()
            zygote = next(pid for pid in find_pids("autods.runner.zygote") if f'"{workload}"' in read_command(pid))
            processes = {zygote, *(child.pid for child in psutil.Process(zygote).children())}
            find_raylet(zygote).kill()
            wait_until_gone(processes, 60)
            (data / "open").touch()
            code = driver.wait(300)
        finally:
            driver.kill()
            driver.wait()
    assert code == 0, (tmp_path / "said.txt").read_text()
    report = json.loads((out / "run.json").read_text())
    first, last = report["attempts"][0], report["attempts"][-1]
    assert (report["status"], report["step"], report["global_batch"]) == ("done", STEPS, GLOBAL_BATCH)
    assert (first["world_size"], last["world_size"], last["first_step"]) == (2, 1, 4)
    assert "world size 1 instead of 2" in (tmp_path / "said.txt").read_text()
    before, after = steps_of(out, 1), steps_of(out, last["number"])
    assert sorted(after) == list(range(5, STEPS + 1))
    assert after[5]["loss"] == pytest.approx(before[5]["loss"], rel=1e-2)  # bf16, which rounds to 3 digits
    for step, row in (before | after).items():
        assert row["samples"] == [(step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH]


def test_a_fit_of_two_nodes_needs_no_ipv4(tmp_path, monkeypatch):
    if (why := why_no_namespaces()) is not None:
        pytest.skip(why)
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    nodes = [sys.executable, "-m", "tests.support.namespaces", "2", "1"]
    ranks = ("--gpus", "2", "--nodes", "2", "--address", "ADDRESS", "--gpu-memory", "1GiB")
    search = ("--ladder", "zero1", "--config", short_config(tmp_path))
    fit = begin_fit(GATED.parent / "tiny.py", tmp_path / "out", *ranks, *search, inside=in_new_namespace(nodes))
    try:
        code = fit.wait(300)
    finally:
        fit.terminate()
        fit.wait()
    said = (tmp_path / "out" / "said.txt").read_text()
    assert code == 0, said
    assert "1 ranks on each of fd00:77::1, fd00:77::2" in said
    assert {one["kind"] for one in read_outcomes(tmp_path / "out")} == {"fit"}


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
