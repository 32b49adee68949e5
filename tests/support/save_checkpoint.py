"""Plain training of tiny.py by a config: saves a checkpoint, and the weights as training has them.

save_checkpoint.py FOLDER…, each with its ds_config.json
"""

import json
import sys
import time
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "workloads"))
import tiny


def train(folder: Path) -> None:
    torch.manual_seed(0)
    model = tiny.build_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=json.loads((folder / "ds_config.json").read_text()),
    )
    batch = tiny.build_batch(engine.train_micro_batch_size_per_gpu())
    for _ in range(3 * engine.gradient_accumulation_steps()):
        engine.backward(engine(**batch))
        engine.step()
    engine.save_checkpoint(str(folder), tag="end")
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    if engine.global_rank == 0:
        torch.save(weights, folder / "weights.pt")
    torch.distributed.barrier()


def leave_together(folder: Path) -> None:
    """End gloo's group when no rank is in a collective: one whose peer closes its connections meanwhile aborts."""
    (folder / f"left{torch.distributed.get_rank()}").touch()
    while len(list(folder.glob("left*"))) < torch.distributed.get_world_size():
        time.sleep(0.01)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        train(Path(name))
    leave_together(Path(sys.argv[1]))
