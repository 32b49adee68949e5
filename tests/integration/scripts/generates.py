"""A script of reinforcement learning in small: it opens a manager and a mesh, and trains on texts that it generates."""

import multiprocessing
import os
import sys

import deepspeed
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

NEW_TOKENS = 6
WAYS = (
    {"do_sample": True, "top_p": 0.9},
    {"num_beams": 2},
    {"cache_implementation": "static"},
    {"use_cache": False, "synced_gpus": True},
    {"num_return_sequences": 2, "do_sample": True, "return_dict_in_generate": True, "output_scores": True},
)

if __name__ == "__main__":
    batch = int(sys.argv[2])
    if 2 * batch % 4:
        raise ValueError(f"generation_batch_size ({2 * batch}) must be divisible by num_generations (4).")
    with multiprocessing.Manager() as manager:
        assert manager.dict(a=1)["a"] == 1
    deepspeed.init_distributed()
    assert deepspeed.get_accelerator().device_count() % int(os.environ["LOCAL_WORLD_SIZE"]) == 0, "too few cards"
    mesh = init_device_mesh(deepspeed.get_accelerator().device_name(), (1, 2), mesh_dim_names=("pipe", "data"))
    assert (mesh["data"].size(), mesh["data"].get_group().size(), mesh["pipe"].size()) == (2, 2, 1)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=sys.argv[1])
    for _ in range(20):
        prompt = torch.randint(3, 96, (batch, 8), device=engine.device)
        for way in WAYS:
            made = engine.module.generate(prompt, max_new_tokens=NEW_TOKENS, **way)
            tokens = getattr(made, "sequences", made)
        engine.train()
        engine.backward(engine(input_ids=tokens[:batch], labels=tokens[:batch]).loss)
        engine.step()
