"""The commands and Python blocks of README and docs that take seconds are run as they are written.

The others are only parsed, in tests/unit/test_documents.py. `ONLY_PARSED` has them with the reason.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from autods.cli.main import main
from tests.support.documents import PAGES, ROOT, blocks, commands

# How a command begins, and what else it has, with the reason why it is not run here.
ONLY_PARSED = {
    r"fit (?!.*--help)": "trials take minutes; test_fit.py and `make demo` run fits",
    r"probe": "trials take minutes; test_probe_trials.py runs probes",
    r"plan": "a plan of such a model takes half a minute; test_plan.py plans a small one",
    r"explain \S+ [^-]": "simulates such a model; test_explain.py does that with a small one",
    r"explain \S+$": "the same with --gpus is run",
    r"doctor --": "builds DeepSpeed's ops for minutes, or needs an NVMe disk; tests/unit/inspector has both",
    r"diagnose --json$": "names an option; the same with a log is run",
    r"report \S+-(probe|run)": "needs the folder of a probe or a run; tests of the commands report such",
    r"run": "a run trains for minutes; tests/integration/test_run_attempts.py has its attempts",
    r"diagnose <\(": "needs a shell and the kernel's log; tests/integration/hostile/test_logs.py has pipes",
}
LOG = "step 3\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
CONFIG = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "train_batch_size": 32,
    "bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "overlap_comm": True},
}  # fmt: skip


def is_run(line: str) -> bool:
    return not any(re.match(f"autods {pattern}", line) for pattern in ONLY_PARSED)


RUN = sorted({line for _, line in commands() if is_run(line)})


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the files that the documents speak of."""
    for name in ("train.log", "slurm-1234.out", "rank_0.log", "rank_1.log", "logs/rank_0.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(LOG)
    (tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    for name in ("model", "before", "after"):
        (tmp_path / "autods-out" / name).mkdir(parents=True)
        shutil.copy(ROOT / "docs" / "demo.json", tmp_path / "autods-out" / name / "report.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", RUN)
def test_a_documented_command_runs(line: str, readers_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # A machine without a compiler is broken, which is what doctor is there to say.
    assert main(shlex.split(line)[1:]) in ((0, 3) if "doctor" in line else (0,)), capfd.readouterr().err
    shown = capfd.readouterr().out
    expected = {
        "diagnose": "Out of device memory",
        "doctor": "DeepSpeed ops",
        "explain": "zero_optimization",
        "fit": "--gpu-memory",
        "report": "zero3",
    }
    assert ('"kind": "out_of_memory"' if "--json" in line else expected[line.split()[1]]) in shown


def test_each_reason_stands_for_a_documented_command() -> None:
    lines = {line for _, line in commands()}
    for pattern in ONLY_PARSED:
        assert any(re.match(f"autods {pattern}", line) for line in lines), pattern
    assert {line.split()[1] for line in RUN} == {"diagnose", "doctor", "explain", "fit", "report"}


def python_blocks() -> list[str]:
    return [text for page in PAGES for language, text in blocks(page) if language == "python"]


def test_the_documented_models_have_a_loss() -> None:
    import torch

    texts = [text for text in python_blocks() if "def build_batch" in text]
    assert len(texts) == 2
    for text in texts:
        names: dict[str, Any] = {}
        exec(text, names)
        with torch.device("meta"):  # shapes without memory
            assert names["build_model"]()(**names["build_batch"](1)).loss.shape == ()


def test_python_of_the_documents_that_needs_no_trial_runs(
    readers_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # The others need trials, a simulation of GPT-2, or a model that exists.
    others = (
        r"find_best_config|autods\.run|save_pretrained|def build_batch|def build_dataset|"
        r"deepspeed\.initialize|accelerator"
    )
    texts = [text for text in python_blocks() if not re.search(others, text)]
    assert len(texts) == 1
    for text in texts:
        exec(text, {})
    assert "out_of_memory device" in capfd.readouterr().out
