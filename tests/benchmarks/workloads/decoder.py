"""A decoder of transformers by its sizes: GPT-2, Llama, OPT or Qwen2, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

# By family: what its config calls the sizes.
_NAMES = {
    "gpt2": {"width": "n_embd", "layers": "n_layer", "heads": "n_head", "length": "n_positions"},
    "opt": {"mlp": "ffn_dim", "width": "hidden_size"},
    "llama": {"mlp": "intermediate_size", "kv_heads": "num_key_value_heads", "width": "hidden_size"},
    "qwen2": {"mlp": "intermediate_size", "kv_heads": "num_key_value_heads", "width": "hidden_size"},
}
_USUAL = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "length": "max_position_embeddings"}


def build_model(
    family: str,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    length: int,
    mlp: int | None = None,
    kv_heads: int | None = None,
    attention: str = "sdpa",
) -> nn.Module:
    """Return the model. `attention` is that of transformers: sdpa or eager."""
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"width": width, "layers": layers, "heads": heads, "length": length, "mlp": mlp, "kv_heads": kv_heads}
    names = {**_USUAL, **_NAMES[family]}
    options: dict[str, Any] = {names[key]: size for key, size in sizes.items() if size is not None and key in names}
    if family == "opt":
        options["word_embed_proj_dim"] = width
    config = AutoConfig.for_model(family, vocab_size=vocabulary, use_cache=False, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert isinstance(model, nn.Module)
    return model.train()


def build_batch(micro_batch_size: int, vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens, which are their own labels."""
    tokens = torch.randint(0, vocabulary, (micro_batch_size, length))
    return {"input_ids": tokens, "labels": tokens}
