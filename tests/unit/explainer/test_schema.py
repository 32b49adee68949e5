"""The keys of the installed DeepSpeed, with their defaults, as its own code reads them."""

from __future__ import annotations

import pytest

from autods.explainer.explain import read_meanings
from autods.explainer.schema import OPEN_SECTIONS, Schema, describe


@pytest.fixture(scope="module")
def installed() -> Schema:
    return describe({})


def test_keys_of_functions_and_models_have_their_defaults(installed: Schema) -> None:
    keys = installed.keys
    assert keys["zero_optimization.reduce_bucket_size"].default == 500_000_000
    assert keys["zero_optimization.offload_optimizer.device"].default == "none"
    assert keys["activation_checkpointing.partition_activations"].default is False
    assert keys["wall_clock_breakdown"].default is False
    assert keys["aio.queue_depth"].default == 8
    assert "partition" in keys["zero_optimization.stage3_param_persistence_threshold"].help


def test_deprecated_keys_name_their_successors(installed: Schema) -> None:
    assert installed.keys["zero_optimization.cpu_offload"].replaced_by == "offload_optimizer"


def test_every_text_of_ours_is_about_a_key_that_exists(installed: Schema) -> None:
    texts = read_meanings()
    unknown = {
        name
        for name in (*texts.means, *texts.costs)
        if name not in installed.keys and not name.startswith(tuple(f"{section}." for section in OPEN_SECTIONS))
    }
    assert unknown == set()
