"""The command lines that a fit prints train as they are, by each launcher, on two CPU ranks."""

from __future__ import annotations

import re
import runpy
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autods.config.deepspeed import start_settings
from autods.config.rungs import read_rungs
from autods.report import FitReport, to_dict, write
from autods.report.results.fit import FitQuestion
from autods.types import Knobs, ModelFacts
from autods.workload.script_source import ScriptLaunch
from tests.support.composed import compose_config
from tests.support.fits import HERE
from tests.support.launchers import run_line

SCRIPTS = HERE / "scripts_hf"
TRAIN = HERE.parents[1] / "examples" / "train.py"
PLAIN = ("--deepspeed_config", "{ds_config}", "--model", str(HERE / "workloads" / "tiny.py"), "--steps", "20")
FACTS = ModelFacts(
    parameters=577, largest_parameter=512, checkpointing=False, tokens_per_sample=None, has_optimizer=False
)


def found(
    out: Path,
    script: Path,
    *argv: str,
    kind: str,
    own_optimizer: bool = False,
    rung: str = "zero2",
    more: Mapping[str, Any] | None = None,
) -> FitReport:
    """As a fit leaves it when that rung is the answer, micro batch 4, two accumulation steps."""
    base = {"bf16": {"enabled": True}, "gradient_clipping": 0.7, **(more or {})}
    strategy = read_rungs(())[rung]
    knobs = Knobs(
        micro_batch=4,
        accumulation=2,
        checkpointing=False,
        settings=start_settings(strategy, base=base, device_bytes=2**30, facts=FACTS),
    )
    config = compose_config(strategy, knobs, base=base, world_size=2, own_optimizer=own_optimizer)
    asked = ScriptLaunch(path=str(script), argv=argv, kind=kind, takes_local_rank=kind != "accelerate")
    report = FitReport(
        status="fit",
        rung=rung,
        knobs=knobs,
        ds_config=config,
        out=str(out),
        question=FitQuestion(gpus=2, device="cpu", script=asked),
    )
    write(report, out)
    return report


def run(report: FitReport, launcher: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The printed line in a shell."""
    folder.mkdir()
    return run_line(to_dict(report)["launch"][launcher], folder)


def find_plain(out: Path, *more: str) -> FitReport:
    """For the plain script of the examples under ZeRO-3."""
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    return found(out, TRAIN, *PLAIN, *more, kind="deepspeed", rung="zero3", more=optimizer)


def read_losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    return [float(loss) for loss in re.findall(r"step \d+: loss (\d+\.\d{3})", done.stdout)]


def test_a_plain_deepspeed_script_learns_over_20_steps(tmp_path):
    done = run(find_plain(tmp_path / "out", "--memory-budget", "256MiB"), "torchrun", tmp_path / "work")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = read_losses(done)
    assert len(losses) == 20
    assert losses[-1] < losses[0]


def test_a_rank_really_cannot_take_more_than_its_budget(rank_server, tmp_path):
    """The ranks are forked: with the environment that the script wants it does not start them anew."""
    find_plain(tmp_path / "out")
    argv = [word.format(ds_config=tmp_path / "out" / "ds_config.json") for word in PLAIN]
    environment = runpy.run_path(str(TRAIN))["ENVIRONMENT"]
    done = rank_server.run(TRAIN, *argv, "--memory-budget", "1MiB", folder=tmp_path, environment=environment)
    assert done.returncode != 0
    assert not read_losses(done)


def test_a_trainer_script_takes_the_printed_arguments_as_they_are(tmp_path):
    report = found(tmp_path / "out", SCRIPTS / "trainer.py", kind="hf_trainer")
    said = to_dict(report)["launch"]["trainer_arguments"]
    asked = replace(report.question.script, argv=(*said, "--max_steps", "3", "--output_dir", "saved"))
    done = run(replace(report, question=replace(report.question, script=asked)), "deepspeed", tmp_path / "work")
    assert done.returncode == 0, done.stderr[-3000:]  # the Trainer ends where its arguments miss the config
    assert "trained 3 steps in batches of 4" in done.stdout


def test_an_accelerate_script_trains_by_the_file_alone(tmp_path):
    argv = ("--batch_size", "{micro_batch_size}", "--steps", "3")
    report = found(tmp_path / "out", SCRIPTS / "accelerated.py", *argv, kind="accelerate", own_optimizer=True)
    done = run(report, "accelerate", tmp_path / "work")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 3 steps in batches of 4" in done.stdout
