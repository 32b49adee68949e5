"""Fits on a Ray cluster of several raylets on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from clusters import cluster, raylet_above
from watching import Scene, wait_gone

from autods.folders import data_folder

# Of the quick config: one trial of growth, none of tuning, no certificate.
SHORT = {
    "most_trials = 3\n": "most_trials = 1\n",
    "\ntrials = 2\n": "\ntrials = 0\n",
    "most_trials = 4\n": "most_trials = 0\n",
}


def test_of_two_fits_on_one_cluster_one_loses_a_node_and_goes_on_and_the_other_is_not_disturbed(tmp_path):
    """Two nodes for one fit, one for the other, which after the loss waits for the first to end. The head has none."""
    wide, lone = (Scene.at(made(tmp_path / name)) for name in ("wide", "lone"))
    lone.choose("hang", "forward")
    with cluster(0, 2, 2, 2) as address:
        first = begun(wide, address, "--gpus", "4", "--nodes", "2")
        other = begun(lone, address, "--gpus", "2")
        struck = lone.struck()
        (lone.out / "fault.json").unlink()
        ranks = {process.pid for process in lone.zygote().children()}
        raylet_above(struck["pid"]).kill()
        wait_gone(ranks, 60)
        assert struck["pid"] in ranks
        codes = first.wait(120), other.wait(120)
    assert codes == (0, 0), said(wide) + said(lone)
    assert {one["kind"] for one in outcomes(wide)} == {"fit"}
    lost, *after = outcomes(lone)
    assert (lost["failure"], lost["rank"]) == ("infrastructure", -1)
    assert "was lost" in lost["evidence"]
    assert {one["kind"] for one in after} == {"fit"}
    assert "2 ranks on each of 127.0.0.1, 127.0.0.1" in said(wide)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def begun(scene: Scene, address: str, *asked: str) -> subprocess.Popen[bytes]:
    scene.out.mkdir(exist_ok=True)
    config = scene.out.parent / "short.toml"
    text = (data_folder("configs") / "quick.toml").read_text()
    for old, new in SHORT.items():
        assert old in text
        text = text.replace(old, new)
    config.write_text(text)
    common = ("--device", "cpu", "--gpu-memory", "1GiB", "--ladder", "zero1", "--no-forecast", "--config", str(config))
    with open(scene.out / "said.txt", "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "autods", "fit", str(scene.path), "--address", address, *asked, *common,
             "--out", str(scene.out)],
            stdin=subprocess.DEVNULL, stdout=file, stderr=file,
        )  # fmt: skip


def outcomes(scene: Scene) -> list[dict]:
    lines = map(json.loads, (scene.out / "journal.jsonl").read_text().splitlines())
    return [line["record"]["outcome"] for line in lines if line["kind"] == "finished"]


def said(scene: Scene) -> str:
    return (scene.out / "said.txt").read_text()
