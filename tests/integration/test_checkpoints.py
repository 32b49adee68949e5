"""A checkpoint that is saved under the config of a rung loads in plain torch, without an engine or other ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from autods.config.deepspeed import compose, start_settings
from autods.config.strategies import read_rungs
from autods.types import Knobs, ModelFacts
from tests.support.fits import HERE, question

FACTS = ModelFacts(
    parameters=577, largest_parameter=512, checkpointing=False, tokens_per_sample=None, has_optimizer=False
)


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_a_checkpoint_loads_in_plain_torch(name, tmp_path):
    rung = read_rungs(())[name]
    base = question("tiny.py", tmp_path).base | {"bf16": {"enabled": False}}
    settings = start_settings(rung, base=base, device_bytes=2**30, facts=FACTS)
    knobs = Knobs(micro_batch=2, accumulation=2, checkpointing=False, settings=settings)
    config = compose(rung, knobs, base=base, world_size=2, own_optimizer=False)
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    trained(tmp_path)

    model = plain_model()
    untrained = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(plain_weights(tmp_path, whole=name == "ddp"))
    expected = torch.load(tmp_path / "weights.pt")
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key])
        assert not torch.equal(value, untrained[key])


def trained(folder):
    """What save_checkpoint.py leaves there."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [
        sys.executable,
        "-m",
        *launcher,
        str(HERE.parent / "support" / "save_checkpoint.py"),
        str(folder / "ds_config.json"),
        str(folder),
    ]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]


def plain_model():
    """Built without DeepSpeed, from another seed than the ranks'."""
    sys.path.insert(0, str(HERE / "workloads"))
    import tiny

    torch.manual_seed(1)
    return tiny.build_model()


def plain_weights(folder, *, whole):
    """By DeepSpeed's own converter, where ranks saved their parts."""
    if whole:
        return torch.load(folder / "end" / "mp_rank_00_model_states.pt", weights_only=False)["module"]
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="end")
