"""A checkpoint that is saved under the config of a rung loads in plain torch, without an engine or other ranks."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from autods.config.deepspeed import start_settings
from autods.config.rungs import read_rungs
from autods.types import Knobs, ModelFacts
from tests.support.composed import compose_config
from tests.support.fits import HERE, question

FACTS = ModelFacts(
    parameters=577, largest_parameter=512, checkpointing=False, tokens_per_sample=None, has_optimizer=False
)


RUNGS = ("ddp", "zero1", "zero2", "zero3")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, rank_server):
    """What save_checkpoint.py leaves in the folder of each rung; the same two ranks train one after the other."""
    top = tmp_path_factory.mktemp("trained")
    base = question("tiny.py", top).base | {"bf16": {"enabled": False}}
    for name in RUNGS:
        rung = read_rungs(())[name]
        settings = start_settings(rung, base=base, device_bytes=2**30, facts=FACTS)
        knobs = Knobs(micro_batch=2, accumulation=2, checkpointing=False, settings=settings)
        config = compose_config(rung, knobs, base=base, world_size=2, own_optimizer=False)
        (top / name).mkdir()
        (top / name / "ds_config.json").write_text(json.dumps(config))
    script = HERE.parent / "support" / "save_checkpoint.py"
    done = rank_server.run(script, *(top / name for name in RUNGS), folder=top)
    assert done.returncode == 0, done.stderr[-2000:]
    return top


@pytest.mark.parametrize("name", RUNGS)
def test_a_checkpoint_loads_in_plain_torch(trained, name):
    model = plain_model()
    untrained = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(plain_weights(trained / name, whole=name == "ddp"))
    expected = torch.load(trained / name / "weights.pt")
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key])
        assert not torch.equal(value, untrained[key])


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
