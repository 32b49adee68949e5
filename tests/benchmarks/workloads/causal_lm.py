"""The causal language model of the config.json beside this file, which each process reads when it builds the model.

So one prepared process serves all model types, one after the other.
"""

from __future__ import annotations

import contextlib
import importlib
from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from autods.workload import load, make_source

SEQ_LEN = 128
for model_type in {
    **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}:  # before ranks are forked, as autods does for the type of a config
    with contextlib.suppress(ImportError):
        name = model_type.replace("-", "_")
        importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def build_model() -> Any:
    return load(make_source(Path(__file__).parent, task="causal-lm", seq_len=SEQ_LEN)).build_model()


def build_batch(micro_batch_size: int) -> Any:
    return load(make_source(Path(__file__).parent, task="causal-lm", seq_len=SEQ_LEN)).build_batch(micro_batch_size)
