"""The keys of the installed DeepSpeed, with their defaults."""

from __future__ import annotations

import pytest

from autods.config.key_rules import OPEN_SECTIONS
from autods.config.problems import InstalledKeys
from autods.explainer.explain import read_meanings
from autods.explainer.installed import describe


@pytest.fixture(scope="module")
def installed() -> InstalledKeys:
    return describe({})


def test_keys_of_functions_and_models_have_their_defaults(installed: InstalledKeys) -> None:
    defaults = installed.defaults
    assert defaults["zero_optimization.reduce_bucket_size"] == 500_000_000
    assert defaults["zero_optimization.offload_optimizer.device"] == "none"
    assert defaults["activation_checkpointing.partition_activations"] is False
    assert defaults["wall_clock_breakdown"] is False
    assert defaults["aio.queue_depth"] == 8


def test_deprecated_keys_name_their_successors(installed: InstalledKeys) -> None:
    assert installed.replaced["zero_optimization.cpu_offload"] == "offload_optimizer"


def test_every_text_of_ours_is_about_a_key_that_exists(installed: InstalledKeys) -> None:
    texts = read_meanings()
    unknown = {
        name
        for name in (*texts.means, *texts.costs)
        if name not in installed.defaults and not name.startswith(tuple(f"{section}." for section in OPEN_SECTIONS))
    }
    assert unknown == set()


def test_a_field_may_be_given_by_both_of_its_names(installed: InstalledKeys) -> None:
    names = {f"zero_optimization.{name}" for name in ("stage3_max_live_parameters", "max_live_parameters")}
    assert names <= set(installed.defaults)


@pytest.mark.parametrize("section", ["compile", "hybrid_engine", "tensor_parallel", "timers.throughput"])
def test_a_section_that_refuses_unknown_keys_is_strict(installed: InstalledKeys, section: str) -> None:
    assert section in installed.strict


def test_a_removed_key_of_a_section_is_named() -> None:
    ((key, _),) = describe({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}).complaints
    assert key == "zero_optimization.mics_shard_size"


def test_a_removed_feature_is_a_complaint() -> None:
    complaints = dict(describe({"sparse_attention": {"mode": "fixed"}, "steps_per_print": 5}).complaints)
    assert complaints == {
        "sparse_attention": "DeepSpeed Sparse Attention has been removed; the 'sparse_attention' configuration block "
        "is no longer supported"
    }
