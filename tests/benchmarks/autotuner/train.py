"""A plain DeepSpeed script as a user of DeepSpeed Autotuning would have it; it knows nothing of autods.

deepspeed --autotuning run --num_gpus 1 train.py --model gpt2_4x256.py --deepspeed --deepspeed_config ds_config.json
"""

import argparse
import importlib.util
import pathlib

import deepspeed
import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="a file with build_model and build_batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=0)
    asked = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else each CPU rank compiles it first, 22 s
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location("workload", asked.model)
    workload = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(workload)
    model = workload.build_model()
    engine, *_ = deepspeed.initialize(args=asked, model=model, model_parameters=model.parameters())
    while engine.global_steps < asked.steps:
        batch = workload.build_batch(engine.train_micro_batch_size_per_gpu())
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()


if __name__ == "__main__":
    main()
