import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from autods.config.base_config import check_base_config
from autods.config.deepspeed import (
    DEFAULT_OPTIMIZER,
    count_replicas,
    count_sharers,
    enabled_half_precision,
    find_broken_op,
    get_key,
    is_default_optimizer,
    merge,
    place_monitors,
    required_ops,
    start_settings,
    strip_rung_keys,
    use_documented_names,
    without_monitors,
)
from autods.config.rungs import read_rungs
from autods.types import Knobs, ModelFacts
from tests.support.composed import compose_config
from tests.support.ds_configs import PRETRAINING

RUNGS = read_rungs()
FACTS = ModelFacts(
    parameters=32_638_976, largest_parameter=1_048_576, checkpointing=True, tokens_per_sample=64, has_optimizer=False
)
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
OFFLOADED = tuple(name for name, rung in RUNGS.items() if rung.places["optimizer"] != "device")
RATIO = "zero_optimization.offload_optimizer.ratio"
OVERLAP = "zero_optimization.overlap_comm"
ON_DEVICE = tuple(name for name in RUNGS if name not in OFFLOADED)
OTHER_OPS = {"zero3-quantized-weights": ("quantizer",)}


def composed(name: str, *, knobs: Knobs | None = None, base: Mapping[str, Any] | None = None, **said: Any) -> Any:
    said = {"world_size": 2, "own_optimizer": False, "nvme_path": Path("/fast"), **said}
    return compose_config(RUNGS[name], knobs or Knobs(), base=base or {}, **said)


@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize(("world_size", "micro", "accumulation"), [(1, 8, 8), (4, 8, 2), (8, 8, 1), (2, 1, 1)])
def test_every_rung_keeps_the_batch_identity(name: str, world_size: int, micro: int, accumulation: int) -> None:
    knobs = Knobs(micro_batch=micro, accumulation=accumulation)
    config = composed(name, knobs=knobs, base=PRETRAINING, world_size=world_size)
    total, per_gpu, steps = (config[key] for key in BATCH_KEYS)
    assert (per_gpu, steps) == (micro, accumulation)
    assert total == per_gpu * steps * world_size
    check_base_config(config, world_size=world_size)


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({"world_size": 1}, 1),
        ({"world_size": 8}, 8),
        ({"world_size": 8, "base": {"zero_optimization": {"mics_shard_size": 2}}}, 2),
        ({"world_size": 8, "base": {"expert_parallel": {"enabled": True}}}, 1),
    ],
)
def test_an_nvme_buffer_holds_a_part_of_the_largest_parameter(said: dict[str, Any], ranks: int) -> None:
    buffer = composed("zero3-nvme", **said)["zero_optimization"]["offload_param"]["buffer_size"]
    assert FACTS.largest_parameter / ranks <= buffer <= 1.1 * FACTS.largest_parameter / ranks


def test_ranks_that_share_a_sequence_are_one_in_the_batch() -> None:
    shared = {"sequence_parallel_size": 4}
    config = composed("zero2", knobs=Knobs(micro_batch=3, accumulation=2), base=shared, world_size=8)
    assert config["train_batch_size"] == 3 * 2 * 2
    check_base_config(config, world_size=8)


def test_deepspeed_multiplies_itself_under_autotp() -> None:
    config = composed("zero3", base={"tensor_parallel": {"autotp_size": 4}}, world_size=8)
    assert "train_batch_size" not in config
    assert count_replicas(config, 8) == 2
    check_base_config(config, world_size=8)


@pytest.mark.parametrize("name", RUNGS)
def test_what_autods_does_not_tune_stays_as_the_user_wrote_it(name: str) -> None:
    config = composed(name, base=PRETRAINING)
    for key in PRETRAINING.keys() - {*BATCH_KEYS, "zero_optimization"}:
        assert config[key] == PRETRAINING[key], key
    assert config["zero_optimization"]["contiguous_gradients"] is True
    assert config["zero_optimization"]["overlap_comm"] is True


@pytest.mark.parametrize("name", RUNGS)
def test_the_users_config_is_not_changed_by_composing(name: str) -> None:
    base, before = copy.deepcopy(PRETRAINING), copy.deepcopy(PRETRAINING)
    config = composed(name, base=base)
    config["scheduler"]["params"]["warmup_type"] = "log"
    config["optimizer"]["params"]["lr"] = 1.0
    assert base == before


@pytest.mark.parametrize("name", RUNGS)
def test_a_composed_config_is_plain_json(name: str) -> None:
    config = composed(name, base=PRETRAINING)
    assert json.loads(json.dumps(config)) == config


@pytest.mark.parametrize(("name", "rung"), RUNGS.items())
def test_the_rung_sets_stage_and_offload(name: str, rung: Any) -> None:
    base = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"ratio": 0.5}}}
    zero = composed(name, base=base)["zero_optimization"]
    assert zero["stage"] == rung.stage
    tiers = {"cpu": "host", "nvme": "nvme", None: "device"}
    assert tiers[get_key(zero, "offload_param.device")] == rung.places["parameters"]
    assert tiers[get_key(zero, "offload_optimizer.device")] == rung.places["optimizer"]
    assert get_key(zero, "offload_optimizer.ratio") == get_key(rung.ds_config, RATIO)


@pytest.mark.parametrize("switched", [True, False])
@pytest.mark.parametrize("name", RUNGS)
def test_old_names_of_offloads_give_way_to_the_rung(name: str, switched: bool) -> None:
    """DeepSpeed refuses an old name beside its successor, and offloads by it alone."""
    old = dict.fromkeys(("cpu_offload", "cpu_offload_param", "cpu_offload_params"), switched)
    assert not old.keys() & composed(name, base={"zero_optimization": {"stage": 3, **old}})["zero_optimization"].keys()


def test_the_nvme_path_is_filled_in_wherever_the_rung_names_it() -> None:
    config = composed("zero3-nvme", nvme_path=Path("/fast/disk"))
    assert get_key(config, "zero_optimization.offload_param.nvme_path") == "/fast/disk"
    assert get_key(config, "zero_optimization.offload_optimizer.nvme_path") == "/fast/disk"
    assert "{nvme_path}" not in json.dumps(config)


def test_knobs_win_over_the_rung_and_the_base_config() -> None:
    settings = {"zero_optimization.reduce_bucket_size": 123_456, "zero_optimization.offload_param.pin_memory": False}
    config = composed("zero3-offload", knobs=Knobs(settings=settings), base=PRETRAINING)
    assert get_key(config, "zero_optimization.reduce_bucket_size") == 123_456
    assert get_key(config, "zero_optimization.offload_param.pin_memory") is False
    assert get_key(config, "zero_optimization.offload_param.device") == "cpu"


def test_buckets_start_at_a_size_that_fits_the_card() -> None:
    start = start_settings(RUNGS["zero2"], base=PRETRAINING, device_bytes=416 * 2**20, facts=FACTS)
    assert 1.0e6 <= start["zero_optimization.reduce_bucket_size"] <= 1.2e6


def test_a_users_smaller_bucket_is_kept() -> None:
    base = {"zero_optimization": {"reduce_bucket_size": 50_000}}
    start = start_settings(RUNGS["zero2"], base=base, device_bytes=416 * 2**20, facts=FACTS)
    assert start["zero_optimization.reduce_bucket_size"] == 50_000


@pytest.mark.parametrize(("users", "start"), [({}, True), ({OVERLAP: False}, False), ({OVERLAP: "auto"}, True)])
@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_reductions_overlap_backward_unless_the_user_turns_that_off(
    name: str, users: dict[str, object], start: bool
) -> None:
    base = {"zero_optimization": {key.rpartition(".")[2]: value for key, value in users.items()}}
    assert start_settings(RUNGS[name], base=base, device_bytes=2**30, facts=FACTS)[OVERLAP] is start
    as_written = start_settings(RUNGS[name], base=base, device_bytes=2**30, facts=FACTS, as_written=True)
    assert OVERLAP not in as_written


@pytest.mark.parametrize("users", ["auto", None, True])
def test_a_bucket_that_the_user_leaves_open_is_sized_to_the_card(users: object) -> None:
    base = {"zero_optimization": {"reduce_bucket_size": users}}
    start = start_settings(RUNGS["zero2"], base=base, device_bytes=416 * 2**20, facts=FACTS)
    assert start["zero_optimization.reduce_bucket_size"] > 1_000_000


@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize(
    "base", [{}, {"optimizer": None}, {"optimizer": {}}, {"optimizer": {"type": None, "params": None}}]
)
def test_without_an_optimizer_torchs_adamw_is_used_and_none_is_built(name: str, base: dict[str, Any]) -> None:
    config = composed(name, base=base)
    assert config["optimizer"]["type"] == "AdamW"
    assert config["optimizer"]["params"] == DEFAULT_OPTIMIZER["params"] | {"torch_adam": True, "fused": True}
    assert required_ops(config) == OTHER_OPS.get(name, ())


@pytest.mark.parametrize("name", OFFLOADED)
def test_an_offloaded_optimizer_is_deepspeeds_own_cpu_adam(name: str) -> None:
    config = composed(name)
    assert "torch_adam" not in config["optimizer"]["params"]
    assert "zero_force_ds_cpu_optimizer" not in config
    assert "cpu_adam" in required_ops(config)


@pytest.mark.parametrize("name", RUNGS)
def test_the_users_torch_adam_stays_and_needs_no_adam_op(name: str) -> None:
    base = {"optimizer": merge(PRETRAINING["optimizer"], {"params": {"torch_adam": True}})}
    config = composed(name, base=base)
    assert config["optimizer"] == base["optimizer"]
    assert not {"cpu_adam", "fused_adam"} & set(required_ops(config))


@pytest.mark.parametrize("name", OFFLOADED)
def test_torch_adam_alone_keeps_the_default_optimizer(name: str) -> None:
    config = composed(name, base={"optimizer": {"params": {"torch_adam": True}}})
    assert config["optimizer"] == merge(DEFAULT_OPTIMIZER, {"params": {"torch_adam": True}})


@pytest.mark.parametrize("name", RUNGS)
def test_the_default_optimizer_of_every_rung_is_known_as_such(name: str) -> None:
    assert is_default_optimizer(composed(name)["optimizer"])
    assert not is_default_optimizer(composed(name, base=PRETRAINING)["optimizer"])
    assert not is_default_optimizer(None)


@pytest.mark.parametrize("name", ON_DEVICE)
def test_the_users_adamw_is_deepspeeds_fused_one(name: str) -> None:
    assert required_ops(composed(name, base=PRETRAINING)) == ("fused_adam", *OTHER_OPS.get(name, ()))


@pytest.mark.parametrize(
    ("optimizer", "on_device", "on_host"),
    [
        ("Lion", "fused_lion", "cpu_lion"),
        ("Adagrad", None, "cpu_adagrad"),
        ("Lamb", "fused_lamb", "fused_lamb"),
        ("Muon", None, "cpu_adam"),
        ("SGD", None, None),
    ],
)
def test_the_ops_of_deepspeeds_other_optimizers_are_known(
    optimizer: str, on_device: str | None, on_host: str | None
) -> None:
    base = {"optimizer": {"type": optimizer, "params": {"lr": 1e-4}}}
    assert required_ops(composed("zero2", base=base)) == ((on_device,) if on_device else ())
    assert required_ops(composed("zero2-offload", base=base)) == ((on_host,) if on_host else ())


@pytest.mark.parametrize(
    "key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"]
)
def test_what_zero_plus_plus_quantizes_needs_its_op_at_stage_3(key: str) -> None:
    base = {"zero_optimization": {key: True}}
    assert "quantizer" in required_ops(composed("zero3", base=base))
    assert "quantizer" not in required_ops(composed("zero2", base=base))


def test_how_the_users_disk_is_read_wins_over_the_rung() -> None:
    read = composed("zero3-nvme", base={"aio": {"queue_depth": 32, "intra_op_parallelism": 4}})["aio"]
    assert (read["queue_depth"], read["intra_op_parallelism"]) == (32, 4)
    assert read["block_size"] == composed("zero3-nvme")["aio"]["block_size"]


@pytest.mark.parametrize("name", RUNGS)
def test_a_config_names_no_optimizer_if_the_workload_has_one(name: str) -> None:
    config = composed(name, base=PRETRAINING, own_optimizer=True)
    assert "optimizer" not in config
    assert config["scheduler"] == PRETRAINING["scheduler"]
    assert not {"cpu_adam", "fused_adam"} & set(required_ops(config))


@pytest.mark.parametrize(("optimizer", "is_allowed"), [("SGD", True), ("Lamb", True), ("AdamW", None), ("Muon", None)])
@pytest.mark.parametrize("name", RUNGS)
def test_a_named_optimizer_may_be_untested_with_zero(name: str, optimizer: str, is_allowed: bool | None) -> None:
    """Source: DeepSpeed 0.19.8, `_do_optimizer_sanity_check` in runtime/engine.py."""
    base = {"optimizer": {"type": optimizer, "params": {"lr": 0.1}}}
    config = composed(name, base=base)
    assert config["optimizer"] == base["optimizer"]
    assert config.get("zero_allow_untested_optimizer") == (is_allowed if RUNGS[name].stage else None)
    assert (
        composed(name, base=base | {"zero_allow_untested_optimizer": False})["zero_allow_untested_optimizer"] is False
    )


@pytest.mark.parametrize(("size", "sharers"), [(2, 2), ("2", 2), (2.0, 2), ("two", 1), (None, 1), (0, 1), ("auto", 1)])
def test_ranks_that_split_layers_may_be_counted_in_text(size: object, sharers: int) -> None:
    assert count_sharers({"tensor_parallel": {"autotp_size": size}}) == sharers


@pytest.mark.parametrize("name", RUNGS)
def test_a_users_own_optimizer_may_be_offloaded(name: str) -> None:
    config = composed(name, own_optimizer=True)
    assert config.get("zero_force_ds_cpu_optimizer") == (False if name in OFFLOADED else None)


def test_only_nvme_needs_async_io() -> None:
    assert {name for name in RUNGS if "async_io" in required_ops(composed(name))} == {"zero3-nvme"}
    assert required_ops(composed("zero3-nvme")) == ("cpu_adam", "async_io")


def test_merging_nests_and_leaves_both_sides_alone() -> None:
    base, over = {"a": {"x": 1, "y": [1]}, "b": 1}, {"a": {"y": 2}, "b": {"c": 3}}
    assert merge(base, over) == {"a": {"x": 1, "y": 2}, "b": {"c": 3}}
    assert base == {"a": {"x": 1, "y": [1]}, "b": 1}


def test_monitors_and_profilers_are_for_the_training_not_for_trials() -> None:
    logs = {"wandb": {"enabled": True}, "tensorboard": {}, "csv_monitor": {}, "comet": {}}
    profiled = {"steps_per_print": 5, "flops_profiler": {"enabled": True}}
    assert without_monitors({**profiled, **logs}) == {"steps_per_print": 5}


def test_monitors_of_a_run_write_below_the_given_folder() -> None:
    config = {"csv_monitor": {"enabled": True, "output_path": "csv"}, "tensorboard": {"output_path": "/logs"}}
    placed = place_monitors({**config, "wandb": {"project": "one"}}, Path("/here"))
    assert placed["csv_monitor"] == {"enabled": True, "output_path": "/here/csv"}
    assert (placed["tensorboard"], placed["wandb"]) == ({"output_path": "/logs"}, {"project": "one"})
    assert config["csv_monitor"]["output_path"] == "csv"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, None),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": 1}}, "fp16"),  # DeepSpeed takes 1 for true
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": False}}, None),
    ],
)
def test_the_half_precision_is_the_one_that_is_enabled(config: dict[str, Any], kind: str | None) -> None:
    assert enabled_half_precision(config) == kind


def test_the_reason_of_a_broken_op_names_it_once() -> None:
    config = composed("zero2-offload")
    assert find_broken_op(config, {"async_io": "no libaio"}) is None
    assert find_broken_op(config, {"cpu_adam": "no compiler"}) == "its op cpu_adam cannot be built: no compiler"
    named = "cpu_adam cannot be built: g++ is not installed (apt-get install g++)"
    assert find_broken_op(config, {"cpu_adam": named}) == named


def test_zeros_keys_have_the_names_that_deepspeed_documents() -> None:
    """DeepSpeed reads both names and refuses them together, and rungs set the documented ones."""
    base = {"zero_optimization": {"stage": 3, "max_live_parameters": 5, "overlap_comm": True}}
    named = {"stage": 3, "stage3_max_live_parameters": 5, "overlap_comm": True}
    assert use_documented_names(base) == {"zero_optimization": named}
    zero = strip_rung_keys(base)["zero_optimization"]
    assert zero == {"stage3_max_live_parameters": 5, "overlap_comm": True}


def test_bf16_has_the_name_that_deepspeed_documents() -> None:
    assert use_documented_names({"bfloat16": {"enabled": True}}) == {"bf16": {"enabled": True}}
    both = {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}  # DeepSpeed reads the first
    assert use_documented_names(both) == both


def test_what_zero_leaves_open_with_auto_is_left_out() -> None:
    """The rungs decide it, or DeepSpeed's default; a plan computes with numbers."""
    base = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "prefetch_bucket_size": 5}}
    assert use_documented_names(base) == {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5}}
