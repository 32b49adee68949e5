"""A decoder of transformers by its sizes (GPT-2, Llama, OPT, Qwen2, Qwen3) with random weights, or with LoRA."""

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
    "qwen3": {
        "mlp": "intermediate_size",
        "kv_heads": "num_key_value_heads",
        "width": "hidden_size",
        "head": "head_dim",
    },
}
_USUAL = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "length": "max_position_embeddings"}


class Lora(nn.Module):
    """A frozen linear layer beside two small ones that train."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(hidden) + self.up(self.down(hidden))
        return out


def build_model(
    family: str,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    length: int,
    mlp: int | None = None,
    kv_heads: int | None = None,
    head: int | None = None,
    tied: bool = False,
    lora: int = 0,
    attention: str = "sdpa",
    masked: bool = False,
) -> nn.Module:
    """Return the model. `attention` is that of transformers: sdpa or eager. `lora` is the rank in all layers.

    A `masked` one gets a mask with its batch.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    sizes = {"width": width, "layers": layers, "heads": heads, "length": length, "mlp": mlp, "kv_heads": kv_heads}
    sizes["head"] = head
    names = {**_USUAL, **_NAMES[family]}
    options: dict[str, Any] = {names[key]: size for key, size in sizes.items() if size is not None and key in names}
    if family == "opt":
        options["word_embed_proj_dim"] = width
    config = AutoConfig.for_model(family, vocab_size=vocabulary, use_cache=False, **options)
    if family not in ("gpt2", "opt"):
        config.tie_word_embeddings = tied
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    assert isinstance(model, nn.Module)
    if lora:
        model.requires_grad_(False)
        for block in list(model.model.layers.modules()):
            for name, child in block.named_children():
                if isinstance(child, nn.Linear) and not isinstance(block, Lora):
                    setattr(block, name, Lora(child, lora))
        model.enable_input_require_grads()
    return model.train()


def build_batch(micro_batch_size: int, vocabulary: int, length: int, masked: bool = False) -> dict[str, torch.Tensor]:
    """Random tokens, which are their own labels. Those of a `masked` model end in one of padding."""
    tokens = torch.randint(0, vocabulary, (micro_batch_size, length))
    batch = {"input_ids": tokens, "labels": tokens}
    if masked:
        batch["attention_mask"] = torch.ones(micro_batch_size, length, dtype=torch.long)
        batch["attention_mask"][:, -1] = 0
    return batch
