"""Probes on real CPU ranks: every axis reaches them, what runs out is measured, and a killed probe goes on."""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import autods
from autods import InputError
from autods.report.results.probe import ProbeReport
from autods.report.serialize import probe_to_dict as to_dict
from autods.types import Fit
from tests.support.fits import HERE, near_forecasts
from tests.support.held import Held

VARIED, TINY, WIDE, BATCHES = (HERE / "workloads" / f"{name}.py" for name in ("varied", "tiny", "wide", "batches"))


def probe(workload: Path, out: Path, *vary: str, **asked: object) -> ProbeReport:
    said = {
        "gpus": 2,
        "device": "cpu",
        "gpu_memory": "1GiB",
        "config": "quick",
        "forecast": False,
        "repeats": 1,
        **asked,
    }
    return autods.probe(workload, vary=vary, out=out, **said)  # type: ignore[arg-type]


def losses(report: ProbeReport) -> list[float]:
    """The first loss of each cell."""
    found = {record.id: record.outcome for record in report.trials}
    outcomes = [found[cell.trials[0]] for cell in report.cells]
    return [outcome.losses[0] for outcome in outcomes if isinstance(outcome, Fit)]


def test_environment_arguments_and_lengths_reach_the_ranks(ray: object, tmp_path: Path) -> None:
    report = probe(
        VARIED, tmp_path, "rung=zero1", "env.PROBED=1,null", "build_model.depth=1,2", "seq_len=4,8",
        "micro_batch=1,3", precision="fp32",
    )  # fmt: skip
    expected = [
        10_000 * micro + 100 * length + 10 * depth + env
        for env in (1, 7)
        for depth in (1, 2)
        for length in (4, 8)
        for micro in (1, 3)
    ]
    assert losses(report) == expected
    tokens = [cell.tokens_per_second for cell in report.cells[:4:2]]
    samples = [cell.samples_per_second for cell in report.cells[:4:2]]
    assert [token / sample for token, sample in zip(tokens, samples, strict=True)] == pytest.approx([4, 8])  # type: ignore[operator]
    assert report.compared == (1, "tokens")


def test_ranks_are_an_axis_and_one_zygote_serves_them(ray: object, tmp_path: Path) -> None:
    report = probe(TINY, tmp_path, "rung=ddp,zero1", "micro_batch=2", gpus="1,2,3")
    assert [cell.status for cell in report.cells] == ["fit", "refused", "fit", "fit", "fit", "fit"]
    assert "no sharding to gain" in report.cells[1].reason
    sizes = {
        len(list(folder.glob("rank*.log"))) for folder in (tmp_path / "logs").iterdir() if folder.name[0].isdigit()
    }
    assert sizes == {1, 2, 3}


def write_llama(folder: Path, **sizes: int) -> Path:
    """A Hugging Face config of four layers."""
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048}
    shape = {"num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 64}
    config = folder / "config.json"
    config.write_text(json.dumps({**architecture, **shape, **sizes}))
    return config


def test_bf16_states_save_8_bytes_a_parameter_as_forecast(ray: object, tmp_path: Path) -> None:
    ladder = "zero3,zero3-bf16-states"
    # Few tokens and weights, since processors without AVX-512 are slow in bf16.
    model = write_llama(tmp_path, hidden_size=512, intermediate_size=1024)
    report = probe(model, tmp_path, f"rung={ladder}", "seq_len=2")
    measured = [cell.memory["device"].peak_bytes for cell in report.cells]
    plan = autods.plan(model, device="cpu", gpus=2, gpu_memory="1GiB", ladder=ladder, seq_len=2, largest=False)
    expected = [rung.memory["device"].peak_bytes for rung in plan.sites[0].rungs]
    assert measured == near_forecasts(*expected)
    assert plan.facts is not None
    assert [measured[0] - measured[1]] == near_forecasts(8 * plan.facts.parameters // 2)


def test_a_second_copy_in_each_pair_of_ranks_leaves_losses_alone(ray: object, tmp_path: Path) -> None:
    report = probe(TINY, tmp_path, "rung=zero3", "zero_optimization.zero_hpz_partition_size=1,2", gpus=4)
    fits = [record.outcome for record in report.trials if isinstance(record.outcome, Fit)]
    assert len(fits) == 2
    assert fits[0].losses == pytest.approx(fits[1].losses, rel=1e-4)
    asked = {"device": "cpu", "gpus": 4, "gpu_memory": "1GiB", "ladder": "zero3", "micro_batch": 1, "largest": False}
    copies = [{"zero_optimization": {"zero_hpz_partition_size": ranks}} for ranks in (1, 2)]
    forecasts = [autods.plan(TINY, base_config=base, **asked).sites[0].rungs[0].memory["device"] for base in copies]
    measured, forecast = ([at.device_peak_bytes for at in fits], [at.peak_bytes for at in forecasts])
    assert measured[1] - measured[0] == pytest.approx(forecast[1] - forecast[0], rel=0.02)
    assert measured == pytest.approx(forecast, rel=0.1)  # four ranks on two processors wait for each other: up to 6.4 %


def test_states_of_checkpointing_leave_losses_alone(ray: object, tmp_path: Path) -> None:
    model = write_llama(tmp_path, hidden_size=256, intermediate_size=512)
    states = "checkpointing=on,offload,every-2"
    report = probe(model, tmp_path, "rung=zero2", states, "micro_batch=4", "seq_len=16", precision="fp32")
    fits = [record.outcome for record in report.trials if isinstance(record.outcome, Fit)]
    assert fits[0].losses == pytest.approx(fits[1].losses, rel=1e-4)
    assert fits[0].losses == pytest.approx(fits[2].losses, rel=1e-4)
    ranks = {"device": "cpu", "gpus": 2, "gpu_memory": "1GiB", "micro_batch": 4, "seq_len": 16, "precision": "fp32"}
    plan = autods.plan(model, checkpointing="offload", ladder="zero2", largest=False, **ranks)
    forecast = plan.sites[0].rungs[0].memory["device"]
    peaks = [cell.memory["device"].peak_bytes for cell in report.cells]
    assert peaks[:2] == near_forecasts(forecast.peak_bytes, forecast.peak_bytes)


def test_one_value_that_the_model_refuses_costs_its_own_cell_only(ray: object, tmp_path: Path) -> None:
    report = probe(VARIED, tmp_path / "some", "build_model.depth=1,9")
    assert [cell.status for cell in report.cells] == ["fit", "refused"]
    assert "9 layers are too many" in report.cells[1].reason
    with pytest.raises(InputError, match="9 layers are too many"):
        probe(VARIED, tmp_path / "none", "build_model.depth=9")


def test_what_runs_out_of_memory_is_said_with_the_tier_and_the_bytes(ray: object, tmp_path: Path) -> None:
    report = probe(WIDE, tmp_path, "rung=ddp,zero1", gpu_memory="200MiB")
    ddp, zero1 = report.cells
    assert (ddp.status, ddp.tier) == ("out_of_memory", "device")
    assert ddp.missing_bytes
    assert zero1.status == "fit"
    assert 0 < zero1.memory["device"].peak_bytes < 200 * 2**20
    assert report.compared == (2, "samples")


def test_trials_prove_capacity_also_for_two_cells_at_a_time(ray: object, tmp_path: Path) -> None:
    workload = Path(shutil.copy(BATCHES, tmp_path))
    (tmp_path / "met").mkdir()  # the first trial of each cell waits for that of the other
    asked = {"capacity": True, "gpu_memory": "192MiB", "gpus": 1, "precision": "fp32", "parallel_trials": 2}
    report = probe(workload, tmp_path / "out", "rung=ddp", "build_batch.elements=524288,1048576", **asked)
    tried = {record.id: record for record in report.trials}
    for cell in report.cells:
        capacity = cell.capacity
        assert capacity is not None
        assert capacity.verified is not None
        assert capacity.refused == capacity.verified + 1
        assert capacity.exact
        kinds = {tried[id].trial.knobs.micro_batch: tried[id].outcome.kind for id in cell.trials}
        assert (kinds[capacity.verified], kinds[capacity.refused]) == ("fit", "out_of_memory")
    assert sum(record.neighbours for record in report.trials) >= 2


def test_a_hugging_face_config_is_probed_by_its_own_keys(ray: object, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    small = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 99, "n_positions": 48}
    (folder / "config.json").write_text(json.dumps(small))
    report = probe(folder, tmp_path / "out", "build_model.n_embd=32,64", "seq_len=16,32", task="causal-lm")
    assert [cell.status for cell in report.cells] == ["fit"] * 4
    assert [cell.tokens_per_second / cell.samples_per_second for cell in report.cells] == pytest.approx(
        [16, 32, 16, 32]
    )  # type: ignore[operator]


def test_a_scripts_arguments_are_an_axis_of_the_probe(ray: object, tmp_path: Path) -> None:
    argv = "--deepspeed_config {ds_config} --micro-batch {micro_batch_size} --width {width} --samples 64"
    script = HERE / "scripts" / "with_args.py"
    report = probe(script, tmp_path, "rung=zero1", "args.width=8,512", "micro_batch=1,2", script_args=argv.split())
    assert [cell.status for cell in report.cells] == ["fit"] * 4
    narrow, _, wide, _ = (cell.memory["device"].peak_bytes for cell in report.cells)
    assert wide - narrow > 4 * 3 * 512**2  # the fp32 weights alone
    assert [cell.micro_batch for cell in report.cells] == [1, 2, 1, 2]


def test_the_same_probe_again_runs_nothing_and_says_the_same(ray: object, tmp_path: Path) -> None:
    first = probe(TINY, tmp_path, "rung=ddp,zero1", "pin_memory=on,off", repeats=2)
    again = probe(TINY, tmp_path, "rung=ddp,zero1", "pin_memory=on,off", repeats=2)
    told, anew = to_dict(first), to_dict(again)
    assert told["cells"] == anew["cells"]
    assert told["trials"] == anew["trials"]
    assert len(told["trials"]) == 4
    rows = list(csv.DictReader((tmp_path / "probe.csv").open()))
    assert [row["same_as"] for row in rows] == ["", "1", "", "3"]
    assert json.loads((tmp_path / "probe.json").read_text())["cells"] == told["cells"]


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path)


def started(held: Held, *more: str) -> subprocess.Popen[str]:
    asked = "--gpus 2 --device cpu --gpu-memory 1GiB --config quick --vary rung=ddp,zero1 --vary micro_batch=1,2"
    where = [str(held.model), *asked.split(), "--repeats", "2", "--no-forecast", "--out", str(held.folder / "out")]
    return subprocess.Popen(
        [sys.executable, "-m", "autods", "probe", *where, *more],
        env=held.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(out: Path) -> list[str]:
    path = out / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row["key"] for row in rows if row["kind"] == "finished"]


def test_the_same_command_resumes_an_interrupted_probe(held: Held) -> None:
    out = held.folder / "out"
    held.hold(3)
    driver = started(held)
    held.wait_in(driver)
    driver.send_signal(signal.SIGINT)
    _, told = driver.communicate(timeout=150)
    assert driver.returncode == 130
    assert "go on with:" in told
    known = finished(out)
    assert len(known) == 3
    assert not (out / "probe.json").exists()
    held.release()
    again = started(held, "--json")
    shown, told = again.communicate(timeout=200)
    assert again.returncode == 0, told
    assert f"resuming: {len(known)} finished trials are not run again" in told
    keys = finished(out)
    assert keys[: len(known)] == known
    assert len(keys) == len(set(keys)) == 8
    report = json.loads(shown)
    assert [cell["repeats"] for cell in report["cells"]] == [2] * 4
