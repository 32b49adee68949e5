"""`autods plan` on the real simulated device: no GPU, no trial, a workload as users write them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autods.cli.main import main
from autods.forecast.simulate.gpu_library import library_path
from autods.forecast.stored_simulations import ANSWERS_AGAIN, KEEPS
from tests.support.bad_workloads import GOOD
from tests.support.watching import is_running, wait_for

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
SAMPLES = ("--micro-batch", "32", "--no-largest")
CARDS = ("--gpus", "2", "--gpu-memory", "16GiB", "--host-memory", "64GiB")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama") / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


@pytest.fixture(scope="module")
def planned(llama: Path) -> dict[str, Any]:
    """All eight rungs of the tiny Llama with recomputed activations, as JSON; no process of it can import Ray."""
    (llama.parent / "ray.py").write_text("raise ImportError('a plan needs no Ray')")
    path = os.pathsep.join(filter(None, (str(llama.parent), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "autods", "plan", str(llama), *CARDS, "--nvme", "1TiB", *SAMPLES, "--json"]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([*command, "--quiet"], env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def test_every_rung_of_the_ladder_is_forecast(planned: dict[str, Any]) -> None:
    rungs = {row["rung"]: row for row in planned["rungs"]}
    assert list(rungs) == [
        "ddp", "zero1", "zero2", "zero2-offload", "zero3", "zero3-offload-optimizer", "zero3-offload-param",
        "zero3-offload", "zero3-nvme",
    ]  # fmt: skip
    assert {row["verdict"] for row in rungs.values()} == {"fits"}
    for row in rungs.values():
        device = row["device"]
        assert device["low_bytes"] <= device["peak_bytes"] <= device["high_bytes"]
        assert 0 < device["live_peak_bytes"] < device["peak_bytes"]
        assert max(device["by_phase"].values()) == device["peak_bytes"]
    assert rungs["zero2-offload"]["pinned"]["peak_bytes"] > 0
    assert rungs["ddp"]["pinned"]["peak_bytes"] == 0


def test_assumptions_of_a_config_are_reported(planned: dict[str, Any]) -> None:
    assert planned["workload"]["seq_len"] == 128
    assert planned["workload"]["checkpointing"] is True
    assert any("sequences of 128 tokens" in said for said in planned["assumed"])
    assert any("task causal-lm" in said for said in planned["assumed"])


def test_a_second_plan_simulates_nothing_until_a_file_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache := tmp_path / "cache").mkdir()
    (cache / "simulated_device").symlink_to(library_path().parent)
    monkeypatch.setenv("AUTODS_CACHE", str(cache))
    monkeypatch.delenv(KEEPS)
    model, width = tmp_path / "model.py", tmp_path / "width.json"
    model.write_text(GOOD.replace("Linear(4, 1)", "Linear(4, json.load(open(WIDTH)))"))
    model.write_text(f"import json\nWIDTH = {str(width)!r}\n{model.read_text()}")
    width.write_text("1")
    argv = ["plan", str(model), *CARDS, "--ladder", "zero2", "--no-largest", "--json"]
    plans, said = [], []
    for size in ("1", "1", "1000"):
        if width.read_text() != size:
            width.write_text(size)
        assert main(argv) == 0
        printed = capsys.readouterr()
        plans.append(json.loads(printed.out))
        said.append(ANSWERS_AGAIN in printed.err)
    assert said == [False, True, False]
    assert plans[0]["rungs"] == plans[1]["rungs"]
    assert [plan["workload"]["parameters"] for plan in plans] == [5, 5, 5000]


def test_the_largest_micro_batch_fits_and_the_next_does_not(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", str(llama), "--gpus", "2", "--gpu-memory", "4GiB", "--ladder", "zero2", "--json", "--quiet"]
    assert main(argv) == 0
    (row,) = json.loads(capsys.readouterr().out)["rungs"]
    largest = row["largest_micro_batch"]
    assert largest > 8
    # What fragments leave differs from size to size, so that a larger one than the next may fit again.
    refused = re.search(r"; (\d+) does not fit", " ".join(row["assumed"]))
    for size, fits in ((largest, True), (int(refused[1]) if refused else largest + 1, False)):
        assert main([*argv, "--no-largest", "--micro-batch", str(size)]) in (0, 1)
        (row,) = json.loads(capsys.readouterr().out)["rungs"]
        assert (row["device"]["peak_bytes"] <= 4 * 2**30) is fits


def test_the_timeline_of_a_step_has_its_time_and_memory(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.json"
    options = ["--gpus", "2", "--on", "a100-80gb", "--ladder", "zero3", "--timeline", str(path), "--json", "--quiet"]
    assert main(["plan", str(llama), *options, *SAMPLES]) == 0
    data = json.loads(capsys.readouterr().out)
    (row,) = data["rungs"]
    assert data["timeline"] == {"path": str(path), "rung": "zero3", "micro_batch": 32}
    events = json.loads(path.read_text())["traceEvents"]
    stream = [event for event in events if event["ph"] == "X" and event["tid"] == 2]
    assert sum(event["dur"] for event in stream) / 1e6 == pytest.approx(row["step"]["seconds"], rel=1e-4)
    assert {event["name"] for event in events if event.get("cat") == "phase"} == {"forward", "backward", "step"}
    peak = max(sum(event["args"].values()) for event in events if event["ph"] == "C")
    assert peak == pytest.approx(row["device"]["live_peak_bytes"], rel=0.02)
    switched = [each["step"]["tokens_per_second"] for each in data["alternatives"] if each["switched"]]
    assert switched[0] > row["step"]["tokens_per_second"]


def test_nvme_holds_a_model_larger_than_the_part_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSpeed keeps 1e9 elements of a rank in host memory; beyond that each layer needs buffers for its reads."""
    wide = {"num_hidden_layers": 10, "hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 1000}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wide))
    cards = ["--on", "a100-80gb", "--gpus", "1", "--ladder", "zero3-nvme", "--micro-batch", "1", "--no-largest"]
    assert main(["plan", str(tmp_path), *cards, "--json", "--quiet"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rungs"]
    assert row["verdict"] == "fits"
    assert row["exact"]


def test_without_checkpointing_a_rung_needs_more(
    planned: dict[str, Any], llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned["workload"]["checkpointing"] is True
    argv = ["plan", str(llama), *CARDS, *SAMPLES, "--ladder", "zero2", "--checkpointing", "off", "--json", "--quiet"]
    assert main(argv) == 0
    (without,) = json.loads(capsys.readouterr().out)["rungs"]
    recomputing = next(row for row in planned["rungs"] if row["rung"] == "zero2")
    assert without["device"]["live_peak_bytes"] > recomputing["device"]["live_peak_bytes"]


FAULTY = {
    "a method that is not there": ("return torch.nn.Linear(4, 4).nonsense()", 3, "AttributeError: 'Linear' object"),
    "no module": ("return 5", None, "build_model returned int"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_workload_is_reported_in_two_lines(
    fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body, line, says = FAULTY[fault]
    path = tmp_path / "model.py"
    path.write_text(
        f"import torch\ndef build_model():\n    {body}\ndef build_batch(n):\n    return {{'x': torch.zeros(n, 4)}}\n"
    )
    assert main(["plan", str(path), *CARDS, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}:{line}: " if line else f"error: {path}: ")
    assert says in said
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 2


@pytest.mark.parametrize(
    ("config", "task", "says"),
    [({"model_type": "lamma"}, (), "no architecture 'lamma'"), (LLAMA, ("--task", "seq2seq"), "give --task causal-lm")],
)
def test_a_config_that_cannot_be_built_is_reported_with_its_path(
    config: dict[str, Any], task: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["plan", str(path), *CARDS, *task, "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: ")
    assert says in said
    assert len(said.splitlines()) <= 2


def test_ctrl_c_ends_at_once_and_leaves_no_process(llama: Path) -> None:
    command = [sys.executable, "-m", "autods", "plan", str(llama), *CARDS]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "✓ " in line)
        workers = workers_of(process.pid)
        assert workers
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert said.splitlines()[-1] == "interrupted: nothing is left running"
    wait_for(lambda: not any(map(is_running, workers)), 20)  # the kernel may still be burying them


def workers_of(pid: int) -> list[int]:
    """Its children and theirs."""
    children: list[int] = []
    with contextlib.suppress(OSError):  # engines come and go
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return children + [grandchild for child in children for grandchild in workers_of(child)]
