import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config import settings as settings_module
from autods.config.profiles import Budget, TimeLimits, read_profile
from autods.config.settings import Settings, apply_survey, check_precision, describe_script
from autods.devices import Card
from autods.errors import EnvironmentBroken, InputError
from autods.system.host import Hardware, data_folder, installed_versions
from autods.types import ModelFacts, WorkloadSource
from tests.support.reports import LADDER
from tests.support.settings import fit_settings

GIB = 2**30
EIGHT_CARDS = Hardware(
    cpu="a CPU",
    cores=64,
    host_bytes=512 * GIB,
    host_free_bytes=400 * GIB,
    cards=tuple(Card(index=i, name="a card", total_bytes=16 * GIB, free_bytes=15 * GIB) for i in range(8)),
)
NO_CARDS = replace(EIGHT_CARDS, host_bytes=16 * GIB, host_free_bytes=10 * GIB, cards=())
SOURCE = WorkloadSource(kind="file", path="/home/me/model.py", name="model", digest="abc")
FACTS = ModelFacts(parameters=1, largest_parameter=1, checkpointing=False, tokens_per_sample=None, has_optimizer=False)


def with_cards(**changes: Any) -> Hardware:
    """The same machine with other cards."""
    return replace(EIGHT_CARDS, cards=tuple(replace(card, **changes) for card in EIGHT_CARDS.cards))


def asked(**said: Any) -> Settings:
    return fit_settings(said.pop("source", SOURCE), hardware=said.pop("hardware", EIGHT_CARDS), **said)


def refusal(**said: Any) -> str:
    with pytest.raises(InputError) as caught:
        asked(**said)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_all_visible_cards_are_used_by_default() -> None:
    settings = asked()
    assert (settings.gpus, settings.device, settings.device_bytes) == (8, "cuda", 16 * GIB)
    assert not settings.is_limited
    assert settings.base == {"bf16": {"enabled": True}}


def test_the_smallest_card_counts() -> None:
    cards = (replace(EIGHT_CARDS.cards[0], total_bytes=8 * GIB), *EIGHT_CARDS.cards)
    assert asked(hardware=replace(EIGHT_CARDS, cards=cards)).device_bytes == 8 * GIB


def test_what_other_processes_hold_of_a_card_is_no_ranks_to_use() -> None:
    cards = (replace(EIGHT_CARDS.cards[0], others_bytes=3 * GIB, free_bytes=13 * GIB), *EIGHT_CARDS.cards[1:])
    shared = replace(EIGHT_CARDS, cards=cards)
    assert asked(hardware=shared).device_bytes == 13 * GIB
    assert "the card has 16.0 GiB, of which other processes hold 3.0 GiB" in refusal(
        hardware=shared, gpu_memory="14GiB"
    )


def test_cards_that_cannot_be_used_are_the_environments_fault() -> None:
    with pytest.raises(EnvironmentBroken, match="built without CUDA"):
        asked(hardware=replace(EIGHT_CARDS, unusable="torch 2.13.0+cpu is built without CUDA\n  install another"))
    assert asked(hardware=replace(EIGHT_CARDS, unusable="no"), device="cpu", gpus=1).device == "cpu"


def test_cpu_ranks_stand_in_for_gpus_with_the_budget_as_their_memory() -> None:
    settings = asked(hardware=NO_CARDS, device="cpu", gpus=2, gpu_memory="416MiB")
    assert (settings.gpus, settings.device, settings.device_bytes) == (2, "cpu", 416 * 2**20)
    assert settings.is_limited


def test_cpu_ranks_share_the_free_host_memory_when_no_budget_is_given() -> None:
    settings = asked(hardware=NO_CARDS, device="cpu", gpus=2)
    assert 2 * settings.device_bytes <= NO_CARDS.host_free_bytes
    assert settings.is_limited


@pytest.mark.parametrize("gpus", [0, -1])
def test_fewer_than_one_rank_is_refused(gpus: int) -> None:
    assert f"--gpus {gpus}: at least one rank is needed" in refusal(gpus=gpus)
    assert f"--gpus {gpus}: at least one rank is needed" in refusal(gpus=gpus, hardware=NO_CARDS)


def test_more_ranks_than_cards_are_refused_with_the_number_there_is() -> None:
    assert "--gpus 9: this machine shows 8 GPUs" in refusal(gpus=9)


def test_without_a_gpu_cpu_ranks_are_offered_not_taken() -> None:
    said = refusal(hardware=NO_CARDS, gpus=2)
    assert "no CUDA GPU is visible" in said
    assert "--device cpu" in said


def test_cpu_ranks_have_to_be_counted() -> None:
    assert "give --gpus 2" in refusal(hardware=NO_CARDS, device="cpu")


def test_an_unknown_device_is_refused() -> None:
    assert "no device 'tpu'" in refusal(device="tpu")


@pytest.mark.parametrize("size", ["banana", "0", "-5GiB", 0, -1])
def test_a_wrong_memory_size_is_refused_with_the_right_forms(size: str | int) -> None:
    said = refusal(gpu_memory=size)
    assert said.startswith("--gpu-memory")
    assert "416MiB" in said


def test_bytes_may_be_given_as_a_number() -> None:
    assert asked(gpu_memory=GIB).device_bytes == GIB


def test_more_memory_than_the_card_has_is_refused() -> None:
    assert "the card has 16.0 GiB" in refusal(gpu_memory="17GiB")


def test_more_memory_than_the_host_has_is_refused_for_cpu_ranks() -> None:
    said = refusal(hardware=NO_CARDS, device="cpu", gpus=4, gpu_memory="5GiB")
    assert "4 CPU ranks × 5.0 GiB = 20.0 GiB: this machine has 16.0 GiB" in said


def test_a_budget_above_the_limit_of_a_process_is_refused() -> None:
    bounded = replace(NO_CARDS, process_bytes=4 * GIB)
    said = refusal(hardware=bounded, device="cpu", gpus=2, gpu_memory="3500MiB")
    assert "`ulimit -Hd` lets a process hold 4.0 GiB" in said
    assert "--gpu-memory 3072MiB or less" in said
    assert asked(hardware=bounded, device="cpu", gpus=2, gpu_memory="3GiB").device_bytes == 3 * GIB


@pytest.mark.parametrize(("total", "near"), [(7, "6 or 8"), (1, "2 or 4")])
def test_a_global_batch_that_ranks_cannot_split_is_refused(total: int, near: str) -> None:
    said = refusal(gpus=2, global_batch=total)
    assert f"--global-batch {total} cannot be split over 2 ranks" in said
    assert near in said


@pytest.mark.parametrize("total", [0, -4])
def test_a_step_without_samples_is_named_before_a_missing_card(total: int) -> None:
    assert refusal(hardware=NO_CARDS, global_batch=total).startswith(f"--global-batch {total}: at least one sample")


def test_train_batch_size_is_the_default_global_batch() -> None:
    assert asked(gpus=2, base_config={"train_batch_size": 64}).global_batch == 64
    assert asked(gpus=2, base_config={"train_batch_size": 64}, global_batch=32).global_batch == 32
    assert asked(gpus=2).global_batch is None


def test_micro_batch_and_accumulation_imply_a_global_batch() -> None:
    """By the replicas of the model: the stages of a pipeline share each micro batch."""
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    settings = asked(gpus=4, base_config=base)
    assert apply_survey(settings, FACTS).global_batch == 4 * 8 * 4
    assert apply_survey(settings, replace(FACTS, replica_ranks=2)).global_batch == 4 * 8 * 2
    assert apply_survey(asked(gpus=4, base_config=base, global_batch=16), FACTS).global_batch == 16
    del base["gradient_accumulation_steps"]
    assert apply_survey(asked(gpus=4, base_config=base), FACTS).global_batch is None


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ({"amp": {"enabled": True}, "zero_optimization": {"stage": 1}}, "amp and ZeRO"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16"),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 5}, "train_batch_size 64 is no multiple"),
    ],
)
def test_a_contradicting_base_config_is_refused_before_any_trial(
    tmp_path: Path, base: dict[str, Any], said: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(base))
    message = refusal(gpus=2, base_config=path)
    assert said in message
    assert str(path) in message
    assert said in refusal(gpus=2, base_config=base)


def test_a_base_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("{'fp16': True}")
    assert f"{path}:1:2: is not JSON" in refusal(base_config=str(path))


def test_a_base_config_from_python_that_json_cannot_hold_is_refused() -> None:
    assert "cannot be written as JSON" in refusal(base_config={"wandb": {"dir": Path("/tmp")}})


def test_a_base_config_from_python_is_copied() -> None:
    base = {"bf16": {"enabled": True}, "tensorboard": {"enabled": True}}
    settings = asked(base_config=base)
    base["tensorboard"]["enabled"] = False
    assert settings.base["tensorboard"] == {"enabled": True}


@pytest.mark.parametrize(
    ("base", "precision", "enabled"),
    [
        ({}, "auto", "bf16"),
        ({}, "fp16", "fp16"),
        ({}, "fp32", None),
        ({"fp16": {"enabled": True, "initial_scale_power": 12}}, "auto", "fp16"),
        ({"fp16": {"enabled": False}}, "auto", None),
        ({"bf16": {"enabled": True}}, "bf16", "bf16"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "auto", None),
        ({"torch_autocast": {"enabled": False}}, "auto", "bf16"),
        ({"torch_autocast": {"enabled": True}}, "bf16", "bf16"),
    ],
)
def test_the_users_precision_wins_then_the_one_asked_for_then_bf16(
    base: dict[str, Any], precision: str, enabled: str | None
) -> None:
    found = asked(base_config=base, precision=precision).base
    assert [key for key in ("bf16", "fp16") if found.get(key, {}).get("enabled")] == ([enabled] if enabled else [])
    assert all(found[key] == value for key, value in base.items())


def test_a_card_that_only_emulates_bf16_trains_in_fp16() -> None:
    cards = (*EIGHT_CARDS.cards[:7], replace(EIGHT_CARDS.cards[7], bf16=False))
    mixed = replace(EIGHT_CARDS, cards=cards)
    assert asked(hardware=mixed).base == {"fp16": {"enabled": True}}
    assert asked(hardware=mixed, gpus=7).base == {"bf16": {"enabled": True}}
    assert asked(hardware=mixed, device="cpu", gpus=1).base == {"bf16": {"enabled": True}}
    assert asked(hardware=mixed, precision="bf16").base == {"bf16": {"enabled": True}}


def test_the_old_name_of_bf16_is_a_precision_like_any_other() -> None:
    assert asked(base_config={"bfloat16": {"enabled": True}}).base == {"bf16": {"enabled": True}}
    assert asked(base_config={"bfloat16": {"enabled": False}}).base == {"bf16": {"enabled": False}}


def test_two_precisions_are_refused() -> None:
    base = {"fp16": {"enabled": True}}
    assert "--precision bf16, but fp16 is enabled" in refusal(base_config=base, precision="bf16")
    assert "no precision 'int4'" in refusal(precision="int4")


def test_an_unknown_rung_is_refused_with_the_names_there_are() -> None:
    assert "no rung 'zero9'" in refusal(ladder=("ddp", "zero9"))


def test_an_unknown_rung_in_a_config_file_is_refused(tmp_path: Path) -> None:
    path = config_file(tmp_path, "[memory]", 'ladder = ["dpd"]\n\n[memory]')
    assert "no rung 'dpd'" in refusal(config=str(path))


def test_an_nvme_path_has_to_be_a_folder(tmp_path: Path) -> None:
    assert "is not a folder that can be written" in refusal(nvme_path=tmp_path / "nowhere")
    assert asked(nvme_path=str(tmp_path)).nvme_path == tmp_path


def test_the_output_folder_is_named_after_the_question() -> None:
    first, second = asked(gpus=2), asked(gpus=4)
    assert first.out.name.startswith("model-2xcuda-")
    assert first.out.is_absolute()
    assert first.out == asked(gpus=2).out
    assert first.out != second.out


def test_the_fingerprint_stays_with_the_output_folder_changed(tmp_path: Path) -> None:
    assert asked(out=tmp_path / "a").fingerprint() == asked(out=tmp_path / "b").fingerprint()


@pytest.mark.parametrize(
    "other",
    [
        {"source": replace(SOURCE, digest="abd")},
        {"gpus": 2},
        {"gpu_memory": "8GiB"},
        {"device": "cpu", "gpus": 8},
        {"global_batch": 64},
        {"precision": "fp16"},
        {"base_config": {"gradient_clipping": 1.0}},
        {"config": "quick"},
        {"ladder": ("zero3",)},
        {"nvme_path": "/tmp"},
        {"seed": 1},
        {"hardware": with_cards(name="another card")},
        {"hardware": with_cards(total_bytes=24 * GIB)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_the_fingerprint_changes_with_what_decides_the_answer(other: dict[str, Any]) -> None:
    assert asked(**other).fingerprint() != asked().fingerprint()


@pytest.mark.parametrize("name", ["autods", "torch", "deepspeed", "transformers"])
def test_the_fingerprint_changes_with_the_software(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before, versions = asked().fingerprint(), installed_versions()
    monkeypatch.setattr(settings_module, "installed_versions", lambda: {**versions, name: "99.0"})
    assert asked().fingerprint() != before


def test_a_journal_of_one_micro_batch_a_step_is_of_another_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    accumulating, with_batch = asked().fingerprint(), asked(global_batch=64).fingerprint()
    monkeypatch.setattr("autods.config.deepspeed.ENOUGH_ACCUMULATION", 1)
    assert asked().fingerprint() != accumulating
    assert asked(global_batch=64).fingerprint() == with_batch


def test_the_fingerprint_changes_with_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    before = asked().fingerprint()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert asked().fingerprint() != before


def test_the_fingerprint_changes_with_a_users_rung(tmp_path: Path) -> None:
    text = (data_folder("strategies") / "zero3.toml").read_text()
    (tmp_path / "zero3.toml").write_text(text.replace("low = 0.1", "low = 0.2"))
    assert asked(strategies=(tmp_path,)).fingerprint() != asked().fingerprint()


def test_free_memory_at_the_moment_is_not_part_of_the_question() -> None:
    later = replace(with_cards(others_bytes=GIB, free_bytes=14 * GIB), host_free_bytes=GIB)
    assert asked(hardware=later).fingerprint() == asked().fingerprint()
    on_cpu = {"device": "cpu", "gpus": 2}
    assert asked(hardware=later, **on_cpu).fingerprint() == asked(**on_cpu).fingerprint()


def test_the_budget_is_not_part_of_the_question(tmp_path: Path) -> None:
    path = config_file(tmp_path, "[memory]", "[budget]\ntrials = 7\n\n[memory]")
    mine = asked(config=str(path))
    assert mine.budget == Budget(trials=7)
    assert mine.fingerprint() == asked().fingerprint() == asked(max_trials=5, max_time="20m").fingerprint()


@pytest.mark.parametrize(
    ("ours", "theirs", "covers"),
    [
        (Budget(), Budget(trials=5, seconds=60), True),
        (Budget(trials=50), Budget(trials=5), True),
        (Budget(trials=5), Budget(trials=5), True),
        (Budget(trials=5), Budget(trials=50), False),
        (Budget(trials=5), Budget(), False),
        (Budget(trials=50, seconds=60), Budget(trials=5), False),
    ],
)
def test_a_budget_covers_those_with_no_higher_limit(ours: Budget, theirs: Budget, covers: bool) -> None:
    assert ours.covers(theirs) is covers


@pytest.mark.parametrize("name", ["default", "quick", "thorough"])
def test_each_shipped_config_walks_the_whole_ladder(name: str) -> None:
    profile = read_profile(name)
    assert profile.name == name
    assert tuple(rung.name for rung in asked(config=name).ladder) == LADDER


@pytest.mark.parametrize("ladder", [(), "zero3,zero3-nvme"])
def test_a_rung_outside_the_ladder_joins_it_by_name(ladder: Any) -> None:
    names = [rung.name for rung in asked(ladder=ladder, with_rungs="zero3-bf16-states").ladder]
    assert names[names.index("zero3") + 1] == "zero3-bf16-states"
    assert len(names) == (3 if ladder else len(LADDER) + 1)


def test_lossy_adds_the_rungs_that_change_numbers() -> None:
    names = [rung.name for rung in asked(ladder="zero3", lossy=True).ladder]
    assert names == ["zero3", "zero3-quantized-weights", "zero3-bf16-states", "zero3-offload-bf16-states"]


def test_a_site_knows_the_precision_of_its_config() -> None:
    assert [asked(precision=name).site.precision for name in ("bf16", "fp16", "fp32")] == ["bf16", "fp16", "fp32"]


def test_the_config_of_the_resume_benchmark_can_be_read() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "resume.toml"
    assert read_profile(str(path)).name == "resume"


def test_a_thorough_fit_tries_harder_than_a_quick_one() -> None:
    quick, default, thorough = (read_profile(name) for name in ("quick", "default", "thorough"))
    assert quick.tune.trials < default.tune.trials < thorough.tune.trials
    assert quick.timed.budget_s < default.timed.budget_s < thorough.timed.budget_s


def test_a_longer_stall_limit_lengthens_the_other_limits_alike() -> None:
    usual = asked().profile.limits
    assert asked(stall_limit="10m").profile.limits == TimeLimits(
        stall_s=600, init_s=5 * usual.init_s, wall_s=5 * usual.wall_s, build_s=5 * usual.build_s
    )
    assert asked(stall_limit=30).profile.limits == replace(usual, stall_s=30)  # a shorter one finds a hang sooner


def test_an_unknown_config_is_refused_with_the_names_there_are() -> None:
    said = refusal(config="fastest")
    assert "no config 'fastest'" in said
    assert "default, quick, thorough" in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[tune]\n", "[tuna]\n", "unknown key 'tuna'"),
        ("trials = 12\n", "", "tune lacks 'trials'"),
        ("trials = 12", 'trials = "many"', "tune.trials is 'many', not a whole number"),
        ("trials = 12", "trials = -1", "tune.trials must be at least 0"),
        ("headroom = 0.05", "headroom = 1.5", "memory.headroom must be at least 0 and below 1"),
        ("stall_s = 120.0", "stall_s = 0", "limits must be above 0 s"),
        ("timed = 3", "timed = 30", "most_timed no less than timed"),
        ("trials = 12", "trials = 12 12", "is not TOML"),
    ],
)
def test_a_bad_config_file_is_refused_with_the_file_and_what_is_wrong(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = config_file(tmp_path, old, new)
    message = refusal(config=str(path))
    assert said in message
    assert str(path) in message


def config_file(folder: Path, old: str, new: str) -> Path:
    """The default config with one piece of its text replaced."""
    text = (data_folder("configs") / "default.toml").read_text()
    assert old in text
    path = folder / "mine.toml"
    path.write_text(text.replace(old, new))
    return path


def of_script(config: dict[str, Any], **asked: Any) -> Settings:
    """The base config of a script that gives this config to its engine."""
    source = WorkloadSource(kind="script", path="/train.py", name="train", digest="")
    settings = fit_settings(source, hardware=NO_CARDS, gpus=2, device="cpu", **asked)
    return apply_survey(settings, replace(FACTS, config=config))


def test_a_scripts_precision_stays_unless_one_is_given() -> None:
    assert "bf16" not in of_script({"steps_per_print": 1}).base
    assert of_script({"bf16": {"enabled": True}}).base["bf16"]["enabled"]
    assert of_script({}, precision="bf16").base["bf16"]["enabled"]
    assert not of_script({"bf16": {"enabled": True}}, precision="fp32").base["bf16"]["enabled"]
    another = of_script({"fp16": {"enabled": True, "initial_scale_power": 12}}, precision="bf16").base
    assert (another["bf16"]["enabled"], another["fp16"]["enabled"]) == (True, False)
    with pytest.raises(InputError, match="fp16 and bf16 are both enabled"):
        of_script({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_precision_decides_what_the_base_config_leaves_auto(precision: str) -> None:
    script = WorkloadSource(kind="script", path="/train.py", name="train", digest="", script_kind="hf_trainer")
    base = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto", "loss_scale_window": 100}}
    settings = fit_settings(script, hardware=NO_CARDS, gpus=2, device="cpu", base_config=base, precision=precision)
    assert {half: settings.base[half]["enabled"] for half in base} == {half: half == precision for half in base}
    assert settings.base["fp16"]["loss_scale_window"] == 100


def test_a_script_s_config_is_checked_and_its_global_batch_is_kept() -> None:
    assert of_script({"train_batch_size": 64}).global_batch == 64
    assert of_script({"train_batch_size": 64}, global_batch=32).global_batch == 32
    with pytest.raises(InputError, match="train_batch_size 7 is no multiple"):
        of_script({"train_batch_size": 7})


def test_a_script_is_forecast_unless_nobody_wants_that() -> None:
    assert of_script({}).forecast
    assert not of_script({}, forecast=False).forecast


def test_a_base_config_goes_over_the_script_s_own() -> None:
    base = of_script({"gradient_clipping": 0.5, "steps_per_print": 1}, base_config={"gradient_clipping": 1.0}).base
    assert base == {"gradient_clipping": 1.0, "steps_per_print": 1}


def test_ranks_are_counted_over_all_nodes_and_each_has_as_many() -> None:
    settings = asked(gpus=16, nodes=2, address="auto")
    assert (settings.gpus, settings.nodes, settings.ranks_per_node) == (16, 2, 8)
    assert asked(nodes=2, address="auto").gpus == 16


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"nodes": 2}, "needs a Ray cluster"),
        ({"nodes": 0}, "at least one node"),
        ({"gpus": 3, "nodes": 2, "address": "auto"}, "split evenly over 2 nodes"),
        ({"gpus": 18, "nodes": 2, "address": "auto"}, "9 on each of 2 nodes, and one of them shows 8"),
    ],
)
def test_nodes_that_cannot_be_are_refused(said: dict[str, Any], words: str) -> None:
    assert words in refusal(**said)


def test_the_host_memory_of_a_node_is_for_the_ranks_of_that_node() -> None:
    one = asked(gpus=4, device="cpu", nodes=2, address="auto").device_bytes
    assert one == asked(gpus=2, device="cpu").device_bytes


def test_nodes_change_the_fingerprint_the_address_does_not() -> None:
    two = asked(gpus=8, nodes=2, address="auto").fingerprint()
    assert two != asked(gpus=8).fingerprint()
    assert two == asked(gpus=8, nodes=2, address="10.0.0.1:6379").fingerprint()


def test_a_device_without_fp16_is_told_before_anything_is_built() -> None:
    problems = {"fp16": "this device has no fp16", "cpu_adam": "no compiler"}
    with pytest.raises(InputError, match="this device has no fp16, and the config trains in fp16"):
        check_precision(asked(precision="fp16"), problems)
    check_precision(asked(precision="bf16"), problems)


def test_a_script_under_autocast_is_not_said_to_train_in_fp32() -> None:
    facts, words = replace(FACTS, config={}), "names no precision"
    assert any(words in sentence for sentence in describe_script(of_script({}), facts))
    under_autocast = of_script({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    assert not any(words in sentence for sentence in describe_script(under_autocast, facts))


def test_what_a_script_s_library_drops_is_told_as_a_warning():
    facts = replace(FACTS, config={"bf16": {"enabled": True}}, warnings=("it drops its optimizers",))
    assert describe_script(asked(), facts)[0] == "warning: it drops its optimizers"
    assert describe_script(asked(), FACTS) == ()
