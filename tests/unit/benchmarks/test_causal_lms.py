"""The pure part of the sweep over causal language models: how a config becomes small, and what a table counts."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import causal_lms as sweep


def test_widths_keep_their_share_and_heads_their_groups() -> None:
    default = {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "eos_token_id": 99_999, "tie_word_embeddings": False,
        "text_config": {"model_type": "x", "d_model": 512, "num_heads": 8, "num_key_value_heads": 8},
    }  # fmt: skip
    assert sweep.shrink(default, {"eos_token_id": 7, "text_config": {"num_heads": 2}}) == {
        "hidden_size": 256, "intermediate_size": 768, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 7,
        "text_config": {"model_type": "x", "d_model": 256, "num_heads": 2, "num_key_value_heads": 4},
    }  # fmt: skip


def test_the_table_counts_answers_and_errors() -> None:
    measured = {"measured_bytes": 100, "low_bytes": 90, "peak_bytes": 98, "high_bytes": 99, "error": -0.02}
    rows = {
        "llama": {"plan": {"zero2": "fits", "seconds": 4.0}, "measure": measured},
        "git": {"plan": {"problem": "no images"}},
    }
    text = sweep.table(rows)
    assert "planned: 1 of 2; median 4 s" in text
    assert "git: no images" in text
    assert "median 2.0%, worst -2.0%, within 10 % 1 of 1, inside the interval 0" in text
