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

from autods.config.catalogue import find_machines
from autods.errors import EnvironmentBroken
from autods.runner.runner import RayRunner
from autods.system.host import cache_folder
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


def run_autods(*words: str, cache: Path) -> dict[str, Any]:
    """What a command prints as JSON, with a cache of machines of its own."""
    variables = {**os.environ, "AUTODS_CACHE": str(cache)}
    command = (sys.executable, "-m", "autods", *words, "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Any], Path]:
    """The checks of a doctor that measures this machine, by group and name, and the folder of its files."""
    folder = tmp_path_factory.mktemp("measured")
    words = ("doctor", "--gpus", "--measure", "--machine-file", str(folder / "mine.toml"))
    checks = run_autods(*words, cache=folder / "cache")["checks"]
    return {f"{check['group']}: {check['name']}": check for check in checks}, folder


def test_doctor_shows_what_a_fit_looks_at(examined: tuple[Mapping[str, Any], Path]) -> None:
    check = examined[0]["GPUs: all-reduce"]
    assert re.fullmatch(r"[\d.]+ [MG]iB/s from each rank", check["result"])
    assert check["status"] == "ok"


def test_a_measured_machine_is_kept_and_written(examined: tuple[Mapping[str, Any], Path]) -> None:
    checks, folder = examined
    (machine,) = find_machines(str(folder / "mine.toml"))
    (kept,) = (folder / "cache" / "machines").glob("*.toml")
    assert kept.read_text() == (folder / "mine.toml").read_text()
    assert checks["Measured: machine file"]["result"].startswith(str(folder / "mine.toml"))
    assert int(re.search(r"after (\d+) s", checks["Measured: kept"]["result"])[1]) <= 60  # type: ignore[index]
    assert machine.rates is not None
    assert machine.links is not None
    assert 1e-4 < machine.rates.tflops.fp32 < 50
    assert 0.5 < machine.rates.memory_gb_per_s < 1000
    assert 0.01 < machine.links.between_gpus_gb_per_s < 100
    assert {"memory", "launch_us", "step_us", "core_gb_per_s", "dram"} <= set(machine.measured.known)


def test_a_part_that_cannot_be_measured_is_named(examined: tuple[Mapping[str, Any], Path]) -> None:
    """Without a card there is no page-locked memory, and no folder for NVMe was named."""
    checks, folder = examined
    for name in ("pinned copies", "NVMe"):
        check = checks[f"Measured: {name}"]
        assert check["status"] == "warning"
        assert f"# not measured: {name}: {check['result']}" in (folder / "mine.toml").read_text()
    (machine,) = find_machines(str(folder / "mine.toml"))
    assert machine.measured.pinned_copy is None
    assert machine.nvme_gb_per_s is None


def test_a_plan_prices_with_a_measured_machine(examined: tuple[Mapping[str, Any], Path]) -> None:
    _, folder = examined
    usual = folder / "usual.toml"
    shares = re.sub(r"\n\[measured\]\n.*?\n\n", "\n", (folder / "mine.toml").read_text(), flags=re.DOTALL)
    usual.write_text(shares.replace('-measured"', '-usual"', 1))
    words = ("plan", str(HERE / "workloads" / "tiny.py"), "--gpus", "2", "--ladder", "zero1", "--no-largest", "--quiet")
    machines = f"{folder / 'mine.toml'},{usual}"
    answer = run_autods(*words, "--on", machines, cache=cache_folder())
    seconds = {each["hardware"]["name"]: each["rungs"][0]["step"]["seconds"] for each in answer["machines"]}
    assert len(seconds) == 2
    assert len(set(seconds.values())) == 2
    assert min(seconds.values()) > 0
