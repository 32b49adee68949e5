"""A classifier of sentences of transformers by its sizes: DistilBERT, BERT or DeBERTa-v2, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

_NAMES = {
    "distilbert": {"width": "dim", "layers": "n_layers", "heads": "n_heads", "mlp": "hidden_dim"},
    "bert": {},
    "deberta-v2": {},
}
_USUAL = {
    "width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads", "mlp": "intermediate_size",
}  # fmt: skip
_DEBERTA: dict[str, Any] = {
    "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"], "conv_kernel_size": 3, "conv_act": "gelu", "type_vocab_size": 0,
    "position_biased_input": False, "max_relative_positions": -1,
}  # fmt: skip


def build_model(family: str, width: int, layers: int, heads: int, mlp: int, vocabulary: int, length: int) -> nn.Module:
    """Return the model, with attention that no kernel fuses, as transformers 4.12 had it."""
    sizes = {"width": width, "layers": layers, "heads": heads, "mlp": mlp}
    names = {**_USUAL, **_NAMES[family]}
    options = {names[key]: size for key, size in sizes.items()} | (_DEBERTA if family == "deberta-v2" else {})
    config = AutoConfig.for_model(family, vocab_size=vocabulary, num_labels=3, **options)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    assert isinstance(model, nn.Module)
    return model.train()


def build_batch(micro_batch_size: int, vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens, padded to their length."""
    tokens, mask = torch.randint(0, vocabulary, (micro_batch_size, length)), torch.ones(micro_batch_size, length)
    mask[:, length // 2 :] = 0
    return {
        "input_ids": tokens,
        "attention_mask": mask.long(),
        "labels": torch.randint(0, 3, (micro_batch_size,)),
    }
