"""Mistakes in DeepSpeed configs are named, and right configs are left alone."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.comm.config import DeepSpeedCommsConfig
from deepspeed.utils.comms_logging import CommsLogger

from autods.config.deepspeed import BATCH_KEYS, GATHER, merge, nest_key, read_known_keys
from autods.config.key_rules import find_misspelt_keys
from autods.config.problems import Problem, Question, Rule, find_problems
from autods.config.validator import EXPLAIN_RULES, SEARCH_RULES
from autods.explainer.explain import read_meanings
from autods.explainer.installed import describe
from tests.support.ds_configs import GUIDE, PRETRAINING, TRAINER

INSTALLED = describe({})


def judge(config: dict[str, Any], ranks: int | None = None) -> tuple[Problem, ...]:
    return find_problems(Question(config=config, installed=describe(config), ranks=ranks), EXPLAIN_RULES)


def errors(config: dict[str, Any], ranks: int | None = None) -> dict[str, str]:
    """Key → problem of each error."""
    return {finding.key: finding.problem for finding in judge(config, ranks) if finding.severity == "error"}


@pytest.mark.parametrize("config", [PRETRAINING, GUIDE, TRAINER])
def test_published_configs_have_no_errors(config: dict[str, Any]) -> None:
    assert errors(config) == {}


def test_sizes_that_go_together_depend_on_the_gpus() -> None:
    assert errors(PRETRAINING, ranks=1) == {}
    assert errors(PRETRAINING, ranks=2) == {
        "train_batch_size": "train_batch_size 144 ≠ micro batch 24 × accumulation 6 × 2 ranks",
    }
    assert errors(GUIDE, ranks=24) == {}


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        ((32, 32, None), "micro batch 4 goes, or train_batch_size a multiple of 256"),
        ((24, None, 2), "accumulation 1 goes, or train_batch_size a multiple of 16"),
        ((30, None, None), "write train_batch_size 24 or 32"),
        ((4, None, None), "write train_batch_size 8"),
        ((32, 2, 4), "those sizes are for 4 ranks; write train_batch_size 64, or leave it out"),
    ],
)
def test_a_size_that_goes_is_named(sizes: tuple[int | None, ...], advice: str) -> None:
    config = {key: size for key, size in zip(BATCH_KEYS, sizes, strict=True) if size is not None}
    (problem,) = [each for each in judge(config, ranks=8) if each.severity == "error"]
    assert problem.hint.startswith(advice)


def test_quantized_weights_rule_out_autocast() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True}
    config = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": zero}
    assert errors(config) == {}
    config["torch_autocast"] = {"enabled": True}
    assert errors(config).keys() == {"zero_optimization.zero_quantized_weights"}


SIZES = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("changes", "ranks", "key"),
    [  # as deepspeed.initialize of 0.19.8 takes and refuses them
        ({"train_batch_size": 8, "sequence_parallel_size": 2}, 8, None),
        ({"train_batch_size": 8, "sequence_parallel_size": 2, "data_parallel_size": 4}, 8, None),
        ({"train_batch_size": 16, "sequence_parallel_size": 2}, 8, "train_batch_size"),
        ({"train_batch_size": 8, "sequence_parallel_size": 2, "data_parallel_size": 2}, 8, "data_parallel_size"),
        ({"sequence_parallel_size": 3}, 8, None),  # with parts of a replica
        ({"sequence_parallel_size": "2"}, 8, "sequence_parallel_size"),
        ({"sequence_parallel_size": 0}, None, "sequence_parallel_size"),
        ({"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}}, 8, None),
        ({"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}, 8, "train_batch_size"),
        (
            {"train_batch_size": 16, "tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}},
            8,
            "train_batch_size",
        ),
        ({"tensor_parallel": {"autotp_size": 3}}, 8, "tensor_parallel.autotp_size"),
    ],
)
def test_ranks_that_share_a_sequence_count_as_one(changes: dict[str, Any], ranks: int | None, key: str | None) -> None:
    assert list(errors({**SIZES, **changes}, ranks)) == ([] if key is None else [key])


def test_sizes_of_groups_are_known_keys_with_their_effect() -> None:
    groups = {"sequence_parallel_size": 2, "data_parallel_size": 4, "tensor_parallel": {"autotp_size": 2}}
    assert not groups.keys() & {each.key for each in judge({**SIZES, **groups, "train_batch_size": 8}, ranks=8)}
    sizes = {**SIZES, **groups, "train_batch_size": 8}
    notes = {each.key: each.problem for each in judge(sizes) if each.severity == "note"}
    assert "same samples" in notes["tensor_parallel.autotp_size"]


# Config → five planted mistakes: dotted key, value, severity, the key that is named, words of problem or hint.
PLANTED = {
    "pretraining": (
        PRETRAINING,
        [
            ("gradient_cliping", 1.0, "warning", "gradient_cliping", 'did you mean "gradient_clipping"?'),
            ("bf16.enabled", True, "error", "fp16", "both enabled"),
            ("train_batch_size", 145, "error", "train_batch_size", "no multiple of micro batch"),
            ("zero_optimization.overlap_com", True, "error", "zero_optimization.overlap_com", '"overlap_comm"'),
            ("scheduler.params.warmup_num_step", 10, "error", "scheduler.params.warmup_num_step", '"warmup_num_steps"'),
        ],
    ),
    "guide": (
        GUIDE,
        [
            ("zero_optimization.stage", 4, "error", "zero_optimization.stage", "should be 0, 1, 2"),
            (
                "zero_optimization.offload_param.device",
                "disk",
                "error",
                "zero_optimization.offload_param.device",
                "nvme",
            ),
            (
                "zero_optimization.offload_optimizer.device",
                "nvme",
                "error",
                "zero_optimization.offload_optimizer",
                "nvme_path",
            ),
            (
                "zero_optimization.reduce_bucket_size",
                1e5,
                "warning",
                "zero_optimization.reduce_bucket_size",
                "small messages",
            ),
            ("reduce_scatter", True, "warning", "reduce_scatter", 'belongs into "zero_optimization"'),
        ],
    ),
    "trainer": (
        TRAINER,
        [
            ("zero_optimisation.stage", 2, "warning", "zero_optimisation", 'did you mean "zero_optimization"?'),
            ("amp.enabled", True, "error", "amp", "removed"),
            ("zero_optimization.cpu_offload", True, "warning", "zero_optimization.cpu_offload", "offload_optimizer"),
            ("optimizer.type", "AdamWW", "error", "optimizer.type", "torch.optim"),
            (
                "zero_optimization.offload_param.pin_memory",
                False,
                "warning",
                "zero_optimization.offload_param.pin_memory",
                "slower",
            ),
        ],
    ),
}


@pytest.mark.parametrize(
    ("name", "key", "value", "severity", "named", "words"),
    [(name, *mistake) for name, (_, mistakes) in PLANTED.items() for mistake in mistakes],
)
def test_a_planted_mistake_is_found(name: str, key: str, value: Any, severity: str, named: str, words: str) -> None:
    found = judge(merge(PLANTED[name][0], nest_key(key, value)))
    about = [finding for finding in found if finding.key == named and words in f"{finding.problem}; {finding.hint}"]
    assert [finding.severity for finding in about] == [severity], found


# Config → (severity, key) of each problem, besides the batch.
READ_BY_DEEPSPEED: dict[str, tuple[dict[str, Any], set[tuple[str, str]]]] = {
    "fields by their names": (
        {"zero_optimization": {"stage": 3, "max_live_parameters": 10**9, "gather_16bit_weights_on_model_save": True}},
        set(),
    ),
    "an open section": ({"data_efficiency": {"data_routing": {"random_ltd": {"model_type": "decoder"}}}}, set()),
    "the old name of bf16": ({"bfloat16": {"enabled": True}, "bf16": None}, {("warning", "bfloat16")}),
    "a search of its own": ({"autotuning": {"enabled": True}, "sequence_parallel_size": 2}, set()),
    "a stage as text": (
        {"zero_optimization": {"stage": "3", "offload_param": {"device": "cpu"}, GATHER: False}},
        {("warning", "zero_optimization.stage")},
    ),
    "a comment": ({"_comment": "ours"}, {("warning", "_comment")}),
    "an auto of DeepSpeed's own": ({"pipeline": {"stages": "auto"}, "timers": {"throughput": {}}}, set()),
    "a switch as text": ({"prescale_gradients": "false"}, {("warning", "prescale_gradients")}),
    "a key of compile's that is none": ({"compile": {"enabled": True}}, {("error", "compile.enabled")}),
    "a value that compile refuses": ({"compile": {"passes": ["z2"]}}, {("error", "compile.passes.0")}),
}


@pytest.mark.parametrize("name", READ_BY_DEEPSPEED)
def test_a_key_that_deepspeed_reads_is_not_unknown(name: str) -> None:
    config, expected = READ_BY_DEEPSPEED[name]
    whole = {"train_batch_size": 8, "gradient_clipping": 1.0, "bf16": {"enabled": True}, **config}
    whole = {key: value for key, value in whole.items() if value is not None}
    assert {(problem.severity, problem.key) for problem in judge(whole)} == expected


@pytest.mark.parametrize("begun", ["train_micro_batch_size", "gradient_accumulation"])
def test_the_beginning_of_a_key_names_the_key(begun: str) -> None:
    (problem,) = [each for each in judge({"train_batch_size": 8, begun: 1}) if each.key == begun]
    assert f'did you mean "{begun}_' in problem.hint


def test_a_key_of_many_sections_belongs_to_none() -> None:
    (problem,) = [each for each in judge({"train_batch_size": 8, "enabled": True}) if each.key == "enabled"]
    assert problem.hint == "leave it out"


@pytest.mark.parametrize(
    ("ranks", "size", "is_refused"), [(8, 3, True), (8, "3", True), (8, 4, False), (8, "4", False), (8, 16, False)]
)
def test_a_second_partition_needs_whole_groups(ranks: int, size: int | str, is_refused: bool) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}
    refused = [each.key for each in judge(config, ranks) if each.severity == "error"]
    assert refused == ["zero_optimization.zero_hpz_partition_size"] * is_refused


def test_a_comment_resembles_no_key() -> None:
    (problem,) = [each for each in judge({"train_batch_size": 8, "_comment": "ours"}) if each.key == "_comment"]
    assert problem.hint == "leave it out"


def test_many_keys_of_another_program_get_one_warning() -> None:
    config = {"train_micro_batch_size_per_gpu": 4} | {f"neox_{number}": number for number in range(40)}
    (problem,) = [each for each in judge(config) if "neox" in each.key]
    assert (problem.key, problem.severity) == ("neox_0 and 39 more", "warning")
    assert "40 keys" in problem.problem


def test_a_fraction_where_deepspeed_wants_a_whole_number_gets_one() -> None:
    config = {"train_batch_size": 8, "fp16": {"enabled": True, "min_loss_scale": 0.05}}
    (problem,) = [each for each in judge(config) if each.key == "fp16.min_loss_scale"]
    assert problem.problem.startswith("Input should be a valid integer")
    assert problem.problem.endswith("; it is 0.05")
    assert problem.hint == "write 1, the default, or another whole number"


def test_a_section_inside_itself_is_to_be_left_out() -> None:
    found = judge({"train_batch_size": 8, "fp16": {"enabled": True, "fp16": True}})
    assert [each.hint for each in found if each.key == "fp16.fp16"] == ["leave it out"]


def test_an_unknown_optimizers_arguments_are_not_judged() -> None:
    params = {"lr": 1e-3, "var_freeze_step": 1000, "freeze_steps": 8}
    found = judge({"train_batch_size": 8, "optimizer": {"type": "ZeroOneAdam", "params": params}})
    assert {each.key for each in found if each.key.startswith("optimizer")} == {"optimizer.type"}


def test_text_in_place_of_a_value_is_told_the_value() -> None:
    config = {"train_batch_size": 64, "gradient_accumulation_steps": "8", "fp16": {"enabled": "true"}}
    optimizer = {"type": "AdamW", "params": {"lr": "1e-4"}}
    hints = {each.key: each.hint for each in judge({**config, "gradient_clipping": "1.0", "optimizer": optimizer})}
    assert (hints["gradient_accumulation_steps"], hints["fp16.enabled"]) == ("write 8", "write true")
    assert (hints["gradient_clipping"], hints["optimizer.params.lr"]) == ("write 1", "write 0.0001")


def test_a_check_of_deepspeeds_is_told_in_its_own_words() -> None:
    offload = {"device": "cpu", "ratio": 0.5}
    found = errors({"train_batch_size": 8, "zero_optimization": {"stage": 2, "offload_optimizer": offload}})
    assert found["zero_optimization"].startswith("Partial offloading only supported")


@pytest.mark.parametrize("size", [2e9, 1e5])
def test_the_all_gather_bucket_hurts_at_no_size(size: float) -> None:
    zero = {"stage": 2, "allgather_bucket_size": size, "reduce_bucket_size": size}
    found = judge({"train_batch_size": 8, "zero_optimization": zero})
    hurting = {each.key for each in found if each.hint == "1e7 to 5e8 are usual"}
    assert hurting == {"zero_optimization.reduce_bucket_size"}


def test_keys_that_the_stage_ignores_are_named() -> None:
    ignored = {finding.key for finding in judge(GUIDE) if "ignores it" in finding.problem}
    assert ignored == {f"zero_optimization.{key}" for key in ("allgather_partitions", "allgather_bucket_size")}
    key = "zero_optimization.zero_quantized_nontrainable_weights"
    (about,) = [each for each in judge(merge(PRETRAINING, nest_key(key, True))) if each.key == key]
    assert about.problem == "stage 2 ignores it; it is for stage 3"


@pytest.mark.parametrize(
    ("stage", "changes", "key"),
    [
        (3, {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}, "optimizer.type"),
        (2, {"prescale_gradients": True}, "prescale_gradients"),
        (3, {"prescale_gradients": True}, "prescale_gradients"),
        (3, {"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    ],
)
def test_reduce_scatter_is_off_where_deepspeed_refuses_it(stage: int, changes: dict[str, Any], key: str) -> None:
    config = {"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}, **changes}
    (problem,) = [each for each in judge(config) if each.severity == "error"]
    assert (problem.key, problem.hint) == (key, 'write "reduce_scatter": false in "zero_optimization"')
    off = judge(merge(config, {"zero_optimization": {"reduce_scatter": False}}))
    assert not [each for each in off if each.severity == "error" or each.key.endswith("reduce_scatter")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_sends_more_without_reduce_scatter(stage: int) -> None:
    zero = {"stage": stage, "reduce_scatter": False}
    found = judge({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": zero})
    (about,) = [each for each in found if each.key == "zero_optimization.reduce_scatter"]
    assert (about.severity, about.hint) == ("warning", "leave it true")


def test_keys_that_another_one_turns_off_are_named() -> None:
    config = merge(PRETRAINING, {"fp16": {"loss_scale": 128}})
    assert "fp16.initial_scale_power" in {finding.key for finding in judge(config) if "no effect" in finding.problem}
    offloads = {"offload_optimizer": {"device": "cpu", "buffer_count": 4}}
    found = judge(merge(PRETRAINING, {"zero_optimization": offloads}))
    assert "zero_optimization.offload_optimizer.buffer_count" in {finding.key for finding in found}


def test_the_way_out_of_fp32_is_one_that_accelerate_reads_too() -> None:
    (about,) = [each for each in judge({"train_batch_size": 8}) if each.key == "bf16"]
    assert '"bf16": {"enabled": true}' in about.hint  # accelerate refuses that key in its own file
    assert "mixed_precision: bf16" in about.hint


@pytest.mark.parametrize(
    ("changes", "problem"),
    [  # as the engine of 0.19.8 takes and refuses them
        ({}, None),
        ({"bf16": {"enabled": True}}, "torch's schedules refuse the optimizer of ZeRO or half precision"),
        ({"zero_optimization": {"stage": 1}}, "torch's schedules refuse the optimizer of ZeRO or half precision"),
        ({"scheduler.type": "LRScheduling"}, "neither DeepSpeed nor torch has the schedule 'LRScheduling'"),
    ],
)
def test_torchs_schedules_go_without_zero_and_half_precision(changes: dict[str, Any], problem: str | None) -> None:
    config = {"train_batch_size": 8, "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 10}}}
    for key, value in changes.items():
        config = merge(config, nest_key(key, value))
    assert errors(config) == ({} if problem is None else {"scheduler.type": problem})


@pytest.mark.parametrize("section", [{}, {"enabled": False}, {"enabled": True}])
def test_the_comms_logger_is_on_wherever_its_section_is(section: dict[str, Any]) -> None:
    logger = CommsLogger()
    logger.configure(DeepSpeedCommsConfig({"comms_logger": section}))
    assert logger.enabled  # as engines of 0.19.8 configure it
    (about,) = [each for each in judge({"train_batch_size": 8, "comms_logger": section}) if "comms" in each.key]
    assert (about.severity, about.hint) == ("warning", "leave the section out for real training")
    assert ("turns it on" in about.problem) is (section.get("enabled") is not True)


def test_a_default_that_surprises_is_told() -> None:
    config = {key: value for key, value in PRETRAINING.items() if key != "gradient_clipping"}
    (about,) = [finding for finding in judge(config) if finding.key == "gradient_clipping"]
    default = describe(config).defaults["gradient_clipping"]
    assert f"clips at {default}" in about.problem


def test_stage_3_without_whole_weights_at_a_save_is_told() -> None:
    def names_the_save(zero: dict[str, Any]) -> bool:
        found = judge({"train_batch_size": 8, "zero_optimization": zero})
        return any(each.severity == "note" and "accelerate raises at the save" in each.problem for each in found)

    assert names_the_save({"stage": 3})
    assert not names_the_save({"stage": 2})
    for name in (GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
        assert not names_the_save({"stage": 3, name: False})  # its author has decided


def test_an_object_that_is_no_object_is_an_error() -> None:
    assert "must be an object" in errors({"train_batch_size": 8, "fp16": True})["fp16"]
    assert "needs train_batch_size" in errors({"bf16": {"enabled": True}})["train_batch_size"]


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("zero_optimization.offload_optimizer", True, 'write {"device": "cpu"}'),
        ("zero_optimization.offload_param", "nvme", 'write {"device": "nvme"}'),
        ("zero_optimization.offload_optimizer", "gpu", 'write {"device": "cpu"}'),
        ("zero_optimization.offload_optimizer", False, "leave it out"),
        ("zero_optimization", 3, 'write {"stage": 3}'),
        ("zero_optimization", "stage3", 'write {"stage": 2}'),
        ("bf16", True, 'write {"enabled": true}'),
        ("fp16", "auto", 'write {"enabled": "auto"}'),
        ("tensorboard", False, 'write {"enabled": false}'),
        ("fp16", None, "leave it out"),
        ("optimizer", "Lamb", 'write {"type": "Lamb"}'),
        ("scheduler", True, 'write {"type": "WarmupLR"}'),
        ("data_types", "bf16", "its keys: buffer_dtype, grad_accum_dtype, keep_in_fp32_modules, param_dtype"),
        ("timers", True, ""),
    ],
)  # fmt: skip
def test_a_section_given_as_a_value_gets_the_object_to_write(key: str, value: Any, advice: str) -> None:
    config = merge({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, nest_key(key, value))
    (found,) = [each for each in judge(config) if each.key == key and each.severity == "error"]
    assert (f'"{key}" must be an object' in found.problem, found.hint) == (True, advice)


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("zero_optimization.reduce_bucket_size", "5e8", "write 500000000"),
        ("zero_optimization.reduce_bucket_size", None, "leave it out"),
        ("zero_optimization.reduce_bucket_size", "large", ""),
        ("aio.thread_count", 4, 'did you mean "intra_op_parallelism"?'),
        ("optimizer.params.learning_rate", 1e-4, 'did you mean "lr"?'),
        ("scheduler.params.num_training_steps", 100, 'did you mean "total_num_steps"?'),
        ("zero_optimization.cpu_offload", True, 'write "offload_optimizer": {"device": "cpu"}'),
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            True,
            'write "stage3_gather_16bit_weights_on_model_save"',
        ),
        ("zero_optimization.cpu_offload", False, "leave it out"),
    ],
)  # fmt: skip
def test_a_finding_says_what_to_write(key: str, value: Any, advice: str) -> None:
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}},
    }
    (found,) = [each for each in judge(merge(config, nest_key(key, value))) if each.key == key]
    assert found.hint == advice


def test_deprecated_keys_have_successors_of_deepspeed() -> None:
    replaced = describe({}).replaced
    assert set(read_known_keys().deprecated) <= set(replaced)


def test_a_switch_for_zero_is_stage_1_and_a_warning() -> None:
    config = {"train_batch_size": 8, "zero_optimization": True}
    (found,) = [each for each in judge(config) if each.key == "zero_optimization"]
    assert (found.severity, found.hint) == ("warning", 'write {"stage": 1}')
    assert Question(config=config).stage == 1


@pytest.mark.parametrize("size", [True, 0.5, 2.0])
@pytest.mark.parametrize("key", ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
def test_a_size_that_deepspeed_multiplies_is_a_warning(key: str, size: float) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, key: size}
    assert errors(config, 8) == {}
    assert "must be a whole number" in next(each.problem for each in judge(config, 8) if each.key == key)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sequence_parallel_size", 3),
        ("sequence_parallel_size", 16),
        ("sequence_parallel_size", 0.5),
        ("steps_per_print", -1),
        ("steps_per_print", 0.5),
        ("scheduler", {"params": "x"}),
        ("optimizer", {"type": "AdamW", "params": {"lr": -1}}),  # by its own kernels; torch's optimizers refuse it
    ],
)
def test_what_deepspeed_trains_with_is_a_warning(key: str, value: Any) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, key: value}
    assert errors(config, 8) == {}
    assert any(each.key.startswith(key) and each.severity == "warning" for each in judge(config, 8))


@pytest.mark.parametrize("size", [3, 16])
def test_a_search_needs_whole_groups_of_a_sequence(size: int) -> None:
    question = Question(config={"sequence_parallel_size": size}, installed=INSTALLED, ranks=8)
    assert any(each.severity == "error" for each in find_problems(question, SEARCH_RULES))


@pytest.mark.parametrize(("ranks", "is_refused"), [(2, True), (6, True), (8, False)])
def test_sequences_and_layers_need_groups_of_both(ranks: int, is_refused: bool) -> None:
    config = {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": "2"}}
    problems = find_problems(Question(config=config, installed=INSTALLED, ranks=ranks), SEARCH_RULES)
    assert [each.problem for each in problems] == [f"{ranks} ranks make no groups of 4"] * is_refused


@pytest.mark.parametrize("rules", [SEARCH_RULES, EXPLAIN_RULES])
def test_clipping_in_the_optimizer_is_refused_before_a_trial(rules: tuple[Rule, ...]) -> None:
    config = {"train_batch_size": 8, "optimizer": {"type": "Lamb", "params": {"lr": 0.1, "max_grad_norm": 1.0}}}
    question = Question(config=config, installed=INSTALLED)
    (problem,) = [each for each in find_problems(question, rules) if each.severity == "error"]
    assert (problem.key, "gradient_clipping" in problem.hint) == ("optimizer.params.max_grad_norm", True)


def test_two_names_of_one_key_are_refused_together() -> None:
    zero = {"stage": 3, "max_live_parameters": 5, "stage3_max_live_parameters": 7}
    assert "two names of one key" in errors({"zero_optimization": zero})["zero_optimization.max_live_parameters"]


@pytest.mark.parametrize("key", ["aio", "bf16"])
def test_a_section_that_deepspeed_takes_as_null_is_a_warning(key: str) -> None:
    (found,) = [each for each in judge({"train_batch_size": 8, key: None}) if "must be an object" in each.problem]
    assert (found.key, found.severity) == (key, "warning")


def test_a_leading_underscore_is_no_misspelling() -> None:
    config = {"_comment": "x", "_fp16": {}, "zero_optimization": {"_stage": 3}, "train_batch_size": 8}
    assert find_misspelt_keys(config) == ()
    assert {each.hint for each in judge(config) if each.key.rpartition(".")[2].startswith("_")} == {"leave it out"}


def test_a_key_that_deepspeed_would_pass_over_without_a_word_is_told() -> None:
    said = find_misspelt_keys(
        {"gradient_cliping": 1.0, "zero_optimisation": {}, "fp16": {}, "project": "mine", "optimizer": {}}
    )
    assert said == (
        '"gradient_cliping": DeepSpeed knows no such key and ignores it; did you mean "gradient_clipping"?',
        '"zero_optimisation": DeepSpeed knows no such key and ignores it; did you mean "zero_optimization"?',
    )


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zero_optimization.zenflow"),
        ({"optimizer": {"type": "Muon"}}, "optimizer.type"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size"),
        ({"compile": {"passes": ["z1", "autosp"]}}, "compile.passes"),
        ({"compile": {"deepcompile": True}}, "compile.deepcompile"),
    ],
)
def test_what_no_fit_chooses_is_noted_with_its_reason(config: dict[str, Any], key: str) -> None:
    notes = [finding for finding in judge(config) if finding.problem.startswith("no fit chooses it: ")]
    assert [(note.key, note.severity) for note in notes] == [(key, "note")]


def test_nothing_is_noted_of_what_a_fit_chooses_among() -> None:
    assert not [finding for finding in judge(PRETRAINING) if "no fit chooses" in finding.problem]


def test_keys_of_features_that_no_fit_chooses_have_a_meaning() -> None:
    features = ("zero_optimization.zenflow.", "zero_optimization.mics_", "tensor_parallel.")
    groups = ("tensor_parallel.tp.", "tensor_parallel.tensor_parallel.")  # for inference
    keys = [key for key in describe({}).defaults if key.startswith(features) and not key.startswith(groups)]
    assert [key for key in keys if key not in read_meanings().means] == []


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("load_universal_checkpoint", True, 'did you mean "load_universal" in "checkpoint"?'),
        ("fp16_enabled", True, 'did you mean "enabled" in "fp16"?'),
        ("zero_stage", 3, 'did you mean "stage" in "zero_optimization"?'),
        ("offload_param_device", "cpu", 'did you mean "device" in "zero_optimization.offload_param"?'),
        ("zero_optimization.gradient_clipping", 1.0, "it belongs at the top"),
        ("config_params", {"bf16": {"enabled": True}}, "its keys belong at the top"),
        ("monitoring", {"enabled": True, "csv_monitor": {}}, 'of its keys only "csv_monitor" belong at the top'),
        ("wandb.entity", "a-team", 'did you mean "team"?'),
        ("weight_quantization.bits", 8, "leave it out"),
        ("autotuning.tuner_types", "random", 'did you mean "tuner_type"?'),
        ("data_efficiency.data_sample", {"enabled": True}, 'did you mean "data_sampling"?'),
        ("seed", 42, "leave it out"),
    ],
)
def test_an_unknown_key_is_told_its_place(key: str, value: Any, hint: str) -> None:
    config = merge({"train_batch_size": 8}, nest_key(key, value))
    assert {each.key: each.hint for each in judge(config)}[key] == hint


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        (
            {"flops_profiler.enabled": True, "flops_profiler.profile_step": "5"},
            "flops_profiler.profile_step",
            "write 5",
        ),
        (
            {"zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/nvme"}, "aio.queue_depth": None},
            "aio.queue_depth",
            "leave it out",
        ),
    ],
)
def test_text_for_a_number_that_is_read_later_is_an_error(changes: dict[str, Any], key: str, hint: str) -> None:
    config: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": 3}}
    for name, value in changes.items():
        config = merge(config, nest_key(name, value))
    (problem,) = [each for each in judge(config) if each.severity == "error"]
    assert (problem.key, problem.hint) == (key, hint)


def test_text_for_a_number_that_nobody_reads_is_no_error() -> None:
    unread = {"flops_profiler": {"profile_step": "5"}, "aio": {"queue_depth": "8"}}
    assert errors({"train_batch_size": 8, **unread}) == {}


def test_a_reference_is_an_error_once() -> None:
    config = {"train_batch_size": "${trainer.batch}", "optimizer": {"type": "AdamW", "params": {"lr": "${lr}"}}}
    found = errors(config)
    assert set(found) == {"train_batch_size", "optimizer.params.lr"}
    assert all("is a reference" in problem for problem in found.values())


def test_of_a_stage_that_a_library_fills_in_nothing_is_said() -> None:
    zero = {"stage": "auto", "stage3_prefetch_bucket_size": 1e8, "offload_param": {"device": "cpu"}}
    said = judge({"train_batch_size": 8, "bf16": {"enabled": True}, "gradient_clipping": 1, "zero_optimization": zero})
    assert [problem.severity for problem in said] == ["note"]  # on "auto"


def test_a_value_that_has_two_names_is_listed_once() -> None:
    assert errors({"train_batch_size": 8, "zero_optimization": {"stage": 4}})["zero_optimization.stage"] == (
        "Input should be 0, 1, 2 or 3; it is 4"
    )


def test_an_inner_section_given_as_a_value_is_an_error() -> None:
    assert errors({"train_batch_size": 8, "timers": {"throughput": False}}) == {
        "timers.throughput": '"timers.throughput" must be an object, not false'
    }
