"""Environment variables that a script sets at its top count, whichever library trains it; autods keeps the cards."""

from __future__ import annotations

from pathlib import Path

import pytest

from autods.runner.runner import RayRunner
from autods.system.host import read_hardware
from autods.workload import make_source
from tests.support.fits import ignore
from tests.support.settings import fit_settings

SCRIPTS = Path(__file__).parent
FIRST_LINES = """
import os
os.environ["HF_HOME"] = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hf-home")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = "7"
from huggingface_hub import constants
print("seen:", constants.HF_HOME, constants.HF_HUB_OFFLINE, repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"""
HF = ("--deepspeed", "{ds_config}", "--per_device_train_batch_size", "{micro_batch_size}", "--use_cpu", "--output_dir")
BATCH = ("--batch_size", "{micro_batch_size}")
CONFIG = ("--deepspeed_config", "{ds_config}")
KINDS = {
    "deepspeed": ("scripts/with_args.py", (*CONFIG, "--micro-batch", "{micro_batch_size}")),
    "hf_trainer": ("scripts_hf/trainer.py", (*HF, "saved")),
    "accelerate": ("scripts_hf/accelerated.py", BATCH),
    "lightning": ("scripts_hf/lit.py", (*CONFIG, *BATCH, "--accumulate", "{gradient_accumulation_steps}")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_script_sets_at_its_top_counts(ray: object, tmp_path: Path, kind: str) -> None:
    name, argv = KINDS[kind]
    script = tmp_path / "train.py"
    script.write_text(FIRST_LINES + (SCRIPTS / name).read_text())
    settings = fit_settings(
        make_source(script, argv=argv), hardware=read_hardware(), out=tmp_path / "out", config="quick", gpus=2,
        device="cpu", gpu_memory="1GiB",
    )  # fmt: skip
    assert settings.source.script_kind == kind
    with RayRunner(settings, ignore) as runner:
        runner.survey()
    (log,) = (path.read_text() for path in (tmp_path / "out").rglob("rank0.log") if "seen:" in path.read_text())
    assert f"seen: {tmp_path}/hf-home True ''" in log
    assert "train.py:5: CUDA_VISIBLE_DEVICES stays ''" in log
