"""Before ranks train their links are measured, and a slow one is named; on real ranks."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autods.errors import EnvironmentBroken
from autods.runner.runner import RayRunner
from tests.support.clusters import begin_fit, short_config
from tests.support.fits import HERE, ignore, question
from tests.support.namespaces import in_new_namespace, why_no_namespaces

UNEVEN = HERE / "workloads" / "uneven.py"
SLOWER, SLOWER_IN_RUN = 1.5, 2.0
NAMED = re.compile(r"rank 1 is the slowest: its forward takes ([\d.]+) × as long as the median rank's")


def test_ranks_meet_for_an_all_reduce_before_they_train(runners: Any) -> None:
    runner = runners()
    began = time.monotonic()
    preflight = runner.preflight()
    seconds = time.monotonic() - began
    assert 2**20 < preflight.reduced_per_s < 2**40
    assert seconds < 20  # 1 s where nothing else runs


def test_ranks_that_cannot_meet_end_the_command(ray: object, tmp_path: Path) -> None:
    environment = {"GLOO_DEVICE_TRANSPORT": "PIGEON"}
    with (
        RayRunner(question("tiny.py", tmp_path), ignore, environment=environment) as runner,
        pytest.raises(EnvironmentBroken, match=r"the ranks do not reach each other: .*\n.*rank\d\.log"),
    ):
        runner.check_machine()


def test_nodes_that_do_not_reach_each_other_end_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable lets each node offer its loopback address to the other one, a usual mistake."""
    if (why := why_no_namespaces()) is not None:
        pytest.skip(why)
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    nodes = [sys.executable, "-m", "tests.support.namespaces", "2", "1"]
    ranks = ("--gpus", "2", "--nodes", "2", "--address", "ADDRESS", "--gpu-memory", "1GiB")
    search = ("--ladder", "zero1", "--config", short_config(tmp_path))
    fit = begin_fit(HERE / "workloads" / "tiny.py", tmp_path / "out", *ranks, *search, inside=in_new_namespace(nodes))
    try:
        code = fit.wait(300)
    finally:
        fit.terminate()
        fit.wait()
    said = (tmp_path / "out" / "said.txt").read_text()
    assert code == 3, said
    assert "the ranks do not reach each other: " in said
    assert '"kind": "started"' not in (tmp_path / "out" / "journal.jsonl").read_text()  # no trial has begun


def run_command(out: Path, command: str, slower: float, *options: str) -> subprocess.CompletedProcess[str]:
    ranks = ("--device", "cpu", "--gpus", "2", "--gpu-memory", "1GiB", "--precision", "fp32")
    search = ("--ladder", "zero1", "--config", "quick", "--no-forecast", "--global-batch", "8")
    words = (sys.executable, "-m", "autods", command, str(UNEVEN), *ranks, *search, *options, "--out", str(out))
    variables = {**os.environ, "SLOWER": str(slower)}
    return subprocess.run(words, capture_output=True, text=True, timeout=400, check=False, env=variables)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """A fit and its run, whose second rank is slower: their reports, the run's journal, and what they printed.

    It is slower still in the run: a warning in the words of the fit's would not be given again.
    """
    out = tmp_path_factory.mktemp("uneven")
    fit = run_command(out / "fit", "fit", SLOWER)
    assert fit.returncode == 0, fit.stderr[-3000:]
    done = run_command(out, "run", SLOWER_IN_RUN, "--steps", "100", "--checkpoint-every", "100")
    assert done.returncode == 0, done.stderr[-3000:]
    files = {"fit": out / "fit" / "report.json", "run": out / "run.json"}
    read = {name: json.loads(path.read_text()) for name, path in files.items()}
    rows = [json.loads(line) for line in (out / "run.jsonl").read_text().splitlines()]
    return {**read, "rows": rows, "printed": fit.stderr, "answer": done.stdout}


def find_named(warnings: list[str]) -> list[float]:
    """The ratios of the warnings that name the second rank."""
    return [float(found[1]) for text in warnings if (found := NAMED.search(text))]


def test_a_fit_names_the_slow_rank_with_its_ratio(uneven: Mapping[str, Any]) -> None:
    (ratio,) = find_named(uneven["fit"]["warnings"])
    assert SLOWER - 0.3 < ratio < SLOWER + 0.3
    slowest = [trial["outcome"]["slowest"] for trial in uneven["fit"]["trials"] if trial["outcome"]["kind"] == "fit"]
    assert [each["rank"] for each in slowest if each] == [1] * len([each for each in slowest if each])
    assert f"warning: rank 1 is the slowest: its forward takes {ratio:.2f} ×" in uneven["printed"]


def test_a_run_names_the_slow_rank_while_it_trains(uneven: Mapping[str, Any]) -> None:
    kinds = [row["kind"] for row in uneven["rows"]]
    started = kinds.index("started")
    named = [row for row in uneven["rows"][started : kinds.index("ended")] if row["kind"] == "warned"]
    ratios = find_named([row["text"] for row in named])
    assert len(ratios) == 1  # once, not at each step
    assert SLOWER_IN_RUN - 0.3 < ratios[0] < SLOWER_IN_RUN + 0.3
    assert set(ratios) <= set(find_named(uneven["run"]["warnings"]))
    assert "rank 1 is the slowest" in " ".join(uneven["answer"].split())


def test_equal_ranks_are_not_named(tmp_path: Path) -> None:
    done = run_command(tmp_path, "fit", 1.0, "--max-trials", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert not [text for text in report["warnings"] if "is the slowest" in text]


def test_doctor_shows_what_a_fit_looks_at() -> None:
    words = (sys.executable, "-m", "autods", "doctor", "--gpus", "--json")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert re.fullmatch(r"[\d.]+ [MG]iB/s from each rank", checks["all-reduce"]["result"])
    assert checks["all-reduce"]["status"] == "ok"
