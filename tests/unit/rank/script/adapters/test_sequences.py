"""Ulysses' attention in a script: it is registered for the chosen micro batch."""

from __future__ import annotations

from typing import Any

import pytest

from autods.rank.script.adapters.deepspeed import share_sequences


def register(model: str, core: str, ranks: int, micro_batch_size: int, seq_length: int | None = None) -> Any:
    return model, core, ranks, micro_batch_size, seq_length


@pytest.mark.parametrize("given", [("llama", "sdpa", 2, 1), ("llama", "sdpa", 2)])
def test_shared_sequences_have_the_chosen_micro_batch(given: tuple[Any, ...]) -> None:
    named = {} if len(given) == 4 else {"micro_batch_size": 1}
    assert share_sequences(8, register, *given, **named, seq_length=256) == ("llama", "sdpa", 2, 8, 256)
