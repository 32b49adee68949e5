"""Fits on a Ray cluster of several raylets on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.clusters import begin_fit, cluster, find_raylet, read_outcomes, short_config
from tests.support.watching import Scene, wait_until_gone


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


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def begun(scene: Scene, address: str, *asked: str) -> subprocess.Popen[bytes]:
    more = ("--gpu-memory", "1GiB", "--ladder", "zero1", "--config", short_config(scene.out.parent))
    return begin_fit(scene.path, scene.out, "--address", address, *asked, *more)


def said(scene: Scene) -> str:
    return (scene.out / "said.txt").read_text()
