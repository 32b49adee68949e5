from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.config.catalogue import read_catalogue
from autods.config.deepspeed import precision_name
from autods.config.plan_settings import PlanSettings, adopt_script_batch, resolve_rehearsal
from autods.config.plan_settings import apply_script_config_to_plan as with_config_of
from autods.devices import Card
from autods.devices.cuda import read_nvml
from autods.errors import InputError
from autods.requests import FitRequest
from autods.system.host import Hardware, data_folder
from autods.types import ModelFacts, WorkloadSource
from tests.support.scripted_nvml import FakeCard, FakeNvml
from tests.support.settings import plan_settings

GIB = 2**30
LAPTOP = Hardware(cpu="a CPU", cores=4, host_bytes=16 * GIB, host_free_bytes=8 * GIB, cards=())
SOURCE = WorkloadSource(kind="file", path="/home/me/model.py", name="model", digest="abc")


def asked(**said: Any) -> PlanSettings:
    return plan_settings(said.pop("source", SOURCE), hardware=said.pop("hardware", LAPTOP), **said)


def refusal(**said: Any) -> str:
    with pytest.raises(InputError) as caught:
        asked(**said)
    assert len(str(caught.value).splitlines()) <= 2
    return str(caught.value)


def test_a_laptop_may_ask_for_eight_large_cards() -> None:
    question = asked(gpus=8, gpu_memory="80GiB", host_memory="1TiB")
    (site,) = question.sites
    assert (site.world_size, site.ranks_per_node, site.nodes) == (8, 8, 1)
    assert (site.machine.device_bytes, site.machine.host_bytes) == (80 * GIB, 1024 * GIB)
    assert site.base == {"bf16": {"enabled": True}}
    assert next(iter(question.ladder)).name == "ddp"


def test_what_nobody_said_is_assumed_and_told() -> None:
    assert asked(gpus=8, gpu_memory="80GiB").assumed == (
        "micro batch 1 (--micro-batch)",
        "host memory without a limit (--host-memory)",
    )
    assert asked(gpus=8, gpu_memory="80GiB", host_memory="1TiB", micro_batch=2).assumed == ()


def test_a_global_batch_of_the_base_config_is_told() -> None:
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    machine: dict[str, Any] = {"gpus": 8, "gpu_memory": "80GiB", "host_memory": "1TiB"}
    assert asked(**machine, base_config=base).assumed == (
        "micro batch 2 (--micro-batch)",
        "global batch 16, as the base config says: micro batches divide it (--global-batch)",
    )
    assert asked(**machine, base_config=base, global_batch=16, micro_batch=2).assumed == ()


def test_a_plan_needs_a_card_or_a_size() -> None:
    assert "--on a100-80gb" in refusal(gpus=8)
    assert "--gpus 8" in refusal(gpu_memory="80GiB")


def test_the_cards_that_are_visible_answer_what_nobody_said() -> None:
    card = Card(index=0, name="NVIDIA L4", total_bytes=22 * GIB, free_bytes=21 * GIB)
    (site,) = asked(hardware=replace(LAPTOP, cards=(card, card))).sites
    assert (site.world_size, site.machine.device_bytes, site.machine.host_bytes) == (2, 22 * GIB, 16 * GIB)


def test_a_machine_of_the_catalogue_brings_its_node() -> None:
    (site,) = asked(on="a100-80gb").sites
    assert (site.world_size, site.ranks_per_node) == (8, 8)
    assert site.machine.host_bytes == 1152 * GIB
    assert site.nvme_path is not None
    (cut,) = asked(on="a100-80gb", host_memory="512GiB").sites
    assert cut.machine.host_bytes == 512 * GIB


def test_ranks_beyond_a_node_of_the_catalogue_take_more_nodes() -> None:
    (site,) = asked(on="a100-80gb", gpus=64).sites
    assert (site.world_size, site.ranks_per_node, site.nodes) == (64, 8, 8)


def test_the_network_between_workstations_is_an_assumption() -> None:
    question = asked(on="rtx3090-24gb,rtx4090-24gb,a100-80gb", gpus=16, micro_batch=1)
    assert [site.nodes for site in question.sites] == [2, 2, 2]
    names = "rtx4090-24gb, rtx3090-24gb"
    assert question.assumed[-1] == f"10 Gbit/s Ethernet between the nodes of {names} (--on FILE.toml)"
    assert asked(on="rtx4090-24gb", gpus=2, micro_batch=1).assumed == ()
    assert asked(on="a100-80gb", gpus=16, micro_batch=1).assumed == ()


def test_cards_on_pcie_are_assumed_to_share_one_box() -> None:
    question = asked(on="rtx4090-24gb", gpus=4, micro_batch=1)
    assert (question.sites[0].nodes, question.sites[0].ranks_per_node) == (1, 4)
    assert question.assumed == (
        "4 cards of rtx4090-24gb in one node with 128.0 GiB of host memory (--nodes, --on FILE.toml)",
    )
    assert asked(on="rtx4090-24gb", gpus=4, nodes=2, micro_batch=1).sites[0].nodes == 2


def test_many_cards_are_assumed_to_be_on_nodes_of_eight() -> None:
    question = asked(gpus=1024, gpu_memory="80GiB", host_memory="1TiB", micro_batch=1)
    assert (question.sites[0].ranks_per_node, question.sites[0].nodes) == (8, 128)
    assert question.assumed == ("8 ranks a node (--nodes)",)
    assert asked(gpus=1024, nodes=1, gpu_memory="80GiB").sites[0].nodes == 1
    assert asked(gpus=32, device="cpu", gpu_memory="1GiB").sites[0].nodes == 1


@pytest.mark.parametrize("links", [True, False])
def test_a_node_of_a_file_holds_no_more_ranks_than_cards(tmp_path: Path, links: bool) -> None:
    card = "[device]\nbytes = 25_200_000_000\n[node]\ngpus = 3\nhost_bytes = 137_438_953_472\n"
    pcie = (
        "over_pcie = true\nbetween_gpus = 'PCIe'\nbetween_gpus_gb_per_s = 32\nto_host = 'PCIe'\nto_host_gb_per_s = 32"
    )
    path = tmp_path / "box3.toml"
    path.write_text(f"name = 'box3'\ntitle = 'three cards'\n{card}" + (f"[links]\n{pcie}\n" if links else ""))
    assert [asked(on=str(path), gpus=gpus).sites[0].ranks_per_node for gpus in (2, 3, 6, 8)] == [2, 3, 3, 2]
    assert "2 ranks a node (--nodes)" in asked(on=str(path), gpus=8).assumed


def test_nodes_share_ranks_evenly_where_nobody_says_how_many() -> None:
    question = asked(on="a100-80gb", gpus=12, micro_batch=1)
    assert (question.sites[0].ranks_per_node, question.sites[0].nodes) == (6, 2)
    assert question.assumed == ("6 ranks a node (--nodes)",)
    assert asked(gpus=20, gpu_memory="80GiB").sites[0].ranks_per_node == 5


def test_ranks_are_spread_evenly_over_the_nodes_that_were_asked_for() -> None:
    (site,) = asked(gpus=16, nodes=2, gpu_memory="80GiB").sites
    assert (site.ranks_per_node, site.nodes) == (8, 2)
    assert "split evenly" in refusal(gpus=15, nodes=2, gpu_memory="80GiB")
    assert "at least one node" in refusal(gpus=8, nodes=0, gpu_memory="80GiB")


def test_a_card_without_bf16_trains_in_fp16_unless_bf16_was_asked_for() -> None:
    (site,) = asked(on="t4-16gb").sites
    assert precision_name(site.base) == "fp16"
    assert "no bf16" in refusal(on="t4-16gb", precision="bf16")


def test_a_plan_for_this_machine_follows_its_card() -> None:
    card = Card(index=0, name="Tesla V100", total_bytes=16 * GIB, free_bytes=16 * GIB, bf16=False)
    here = replace(LAPTOP, cards=(card,))
    assert precision_name(asked(hardware=here).sites[0].base) == "fp16"
    assert "Tesla V100 has no bf16" in refusal(hardware=here, precision="bf16")


def test_a_visible_card_of_the_catalogue_has_its_rates() -> None:
    nvml = FakeNvml(cards=[FakeCard(name="NVIDIA H100 80GB HBM3", uuid=f"GPU-{n}", total_bytes=79 * GIB) for n in "ab"])
    question = asked(hardware=replace(LAPTOP, cards=read_nvml(None, nvml).cards))
    (site,) = question.sites
    assert (site.machine.name, site.machine.device_bytes, site.world_size) == ("here", 79 * GIB, 2)
    known = read_catalogue()["h100-80gb"]
    assert (site.machine.rates, site.machine.links) == (known.rates, known.links)
    assert site.machine.host_bytes == LAPTOP.host_bytes
    assert any("links and host bandwidth of a usual node" in sentence for sentence in question.assumed)


def test_more_ranks_than_visible_cards_stay_on_one_node() -> None:
    card = Card(index=0, name="GeForce RTX 4090", total_bytes=23 * GIB, free_bytes=23 * GIB)
    (site,) = asked(gpus=8, hardware=replace(LAPTOP, cards=(card,))).sites
    assert (site.nodes, site.machine.capability) == (1, (8, 9))


@pytest.mark.parametrize("names", [("NVIDIA Secret",), ("NVIDIA L4", "NVIDIA A40")], ids=["unknown", "mixed"])
def test_a_card_outside_the_catalogue_has_no_rates(names: tuple[str, ...]) -> None:
    cards = tuple(Card(index=0, name=name, total_bytes=22 * GIB, free_bytes=22 * GIB) for name in names)
    cards = tuple(replace(card, capability=(7, 5)) for card in cards)
    (site,) = asked(hardware=replace(LAPTOP, cards=cards)).sites
    assert (site.machine.rates, site.machine.links) == (None, None)
    assert site.machine.capability == (7, 5)


@pytest.mark.parametrize("price", [2, "2.0", {"a100-80gb": 2}, "A100-80GB=2"])
def test_a_price_belongs_to_a_machine(price: Any) -> None:
    question = asked(on="a100-80gb", tokens="300B", price_per_gpu_hour=price)
    assert question.tokens == 3e11
    assert question.sites[0].price_per_gpu_hour == 2


@pytest.mark.parametrize("price", ["Mine=2", "mine=2", {"Mine": 2}])
def test_a_machine_of_a_file_is_priced_by_its_name(price: Any, tmp_path: Path) -> None:
    text = (data_folder("configs") / "hardware" / "t4-16gb.toml").read_text()
    (tmp_path / "mine.toml").write_text(text.replace('name = "t4-16gb"', 'name = "Mine"'))
    question = asked(on=str(tmp_path / "mine.toml"), tokens="1B", price_per_gpu_hour=price, precision="fp16")
    assert question.sites[0].price_per_gpu_hour == 2


def test_a_machine_without_bf16_is_kept_with_a_reason() -> None:
    sites = asked(on="t4-16gb,a100-80gb", precision="bf16").sites
    assert [site.problem for site in sites] == ["NVIDIA T4 16 GB has no bf16", None]


def test_nvme_is_a_size_or_a_folder_that_need_not_be_here() -> None:
    assert asked(gpus=1, gpu_memory="16GiB").sites[0].nvme_path is None
    sized = asked(gpus=1, gpu_memory="16GiB", nvme="1TiB").sites[0]
    assert (sized.machine.nvme_bytes, sized.nvme_path is not None) == (1024 * GIB, True)
    assert asked(gpus=1, gpu_memory="16GiB", nvme_path="/nowhere").sites[0].nvme_path == Path("/nowhere")


def test_the_base_configs_micro_batch_is_the_default() -> None:
    base = {"train_micro_batch_size_per_gpu": 4}
    assert asked(gpus=2, gpu_memory="16GiB", base_config=base).sites[0].micro_batch == 4
    assert asked(gpus=2, gpu_memory="16GiB", base_config=base, micro_batch=2).sites[0].micro_batch == 2


def test_micro_batch_and_accumulation_imply_a_global_batch() -> None:
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    assert asked(gpus=2, gpu_memory="16GiB", base_config=base).sites[0].global_batch == 4 * 8 * 2


def test_ranks_that_share_a_sequence_are_one_in_the_global_batch() -> None:
    base = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 4}
    (site,) = asked(gpus=8, gpu_memory="16GiB", base_config=base).sites
    assert (site.global_batch, site.micro_batch) == (12, 2)
    shared = {"sequence_parallel_size": 4, "gradient_accumulation_steps": 3, "train_micro_batch_size_per_gpu": 2}
    assert asked(gpus=8, gpu_memory="16GiB", base_config=shared).sites[0].global_batch == 2 * 3 * 2
    said = refusal(gpus=8, gpu_memory="16GiB", base_config={"sequence_parallel_size": 4}, global_batch=3)
    assert "2 groups of 4 ranks that train on the same samples" in said


def test_a_micro_batch_must_divide_the_global_batch() -> None:
    assert asked(gpus=2, gpu_memory="16GiB", global_batch=64, micro_batch=8).sites[0].global_batch == 64
    said = refusal(gpus=2, gpu_memory="16GiB", global_batch=64, micro_batch=7)
    assert "micro batch 7 × 2 ranks does not divide the global batch 64" in said
    assert "give --global-batch 70, or a --micro-batch that divides 32" in said


def test_a_batch_that_a_script_fixes_asks_for_a_global_batch() -> None:
    question = asked(source=SCRIPT, gpus=8, gpu_memory="80GiB", global_batch=16)
    with pytest.raises(InputError) as caught:
        adopt_script_batch(question, 8)
    assert "the script's own micro batch 8 × 8 ranks does not divide the global batch 16" in str(caught.value)
    assert caught.value.hint == "give --global-batch 64"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gpus": 0, "gpu_memory": "1GiB"}, "at least one rank"),
        ({"gpus": -1, "device": "cpu"}, "at least one rank"),
        ({"nodes": 0, "device": "cpu"}, "at least one node"),
        ({"gpus": 1, "gpu_memory": "banana"}, "--gpu-memory 'banana' is not a size"),
        ({"gpus": 1, "gpu_memory": "80"}, "give a unit: --gpu-memory 80GiB"),
        ({"gpus": 1, "gpu_memory": 80}, "--gpu-memory 80 is 80 B"),
        ({"gpus": 1, "gpu_memory": "80KiB"}, "give 1MiB or more"),
        ({"gpus": 1, "gpu_memory": "1GiB", "host_memory": "banana"}, "--host-memory 'banana'"),
        ({"gpus": 1, "gpu_memory": "1GiB", "nvme": "banana"}, "--nvme 'banana'"),
        ({"gpus": 1, "gpu_memory": "1GiB", "device": "tpu"}, "no device 'tpu'"),
        ({"gpus": 1, "gpu_memory": "1GiB", "micro_batch": 0}, "--micro-batch 0"),
        ({"gpus": 1, "gpu_memory": "1GiB", "checkpointing": "maybe"}, "it is one of off, every-4"),
        ({"gpus": 1, "gpu_memory": "1GiB", "ladder": ("zero9",)}, "no rung 'zero9'"),
        ({"gpus": 1, "gpu_memory": "1GiB", "on": "all"}, "drop one of the two"),
        ({"gpus": 1, "device": "cpu"}, "give --gpu-memory"),
        ({"gpus": 1, "gpu_memory": "1GiB", "precision": "int8"}, "no precision 'int8'"),
        ({"on": "a100-80gb", "tokens": "many"}, "--tokens 'many' is not an amount"),
        ({"on": "a100-80gb", "price_per_gpu_hour": 2}, "give --tokens 300B"),
        ({"on": "a100-80gb", "tokens": "1B", "price_per_gpu_hour": "cheap"}, "'cheap' is not a price"),
        ({"on": "a100-80gb", "tokens": "1B", "price_per_gpu_hour": -1}, "is not a price"),
        ({"on": "a100-80gb,l4-24gb", "tokens": "1B", "price_per_gpu_hour": 2}, "l4-24gb=2,a100-80gb=2 with the price"),
        ({"on": "all", "tokens": "1B", "price_per_gpu_hour": 2}, "=2,… with the price of each"),
        ({"on": "a100-80gb", "tokens": "1B", "price_per_gpu_hour": {"h100-80gb": 2}}, "no machine 'h100-80gb'"),
    ],
)
def test_wrong_input_is_refused_in_two_lines(wrong: dict[str, Any], said: str) -> None:
    assert said in refusal(**wrong)


def test_a_file_without_rates_is_asked_for_them(tmp_path: Path) -> None:
    path = tmp_path / "box3.toml"
    path.write_text("name = 'b'\ntitle = 'b'\n[device]\nbytes = 25_000_000_000\n[node]\ngpus = 3\nhost_bytes = 1\n")
    said = refusal(on=str(path), timeline=tmp_path / "step.json")
    assert said.startswith(f"{path}: --timeline needs the rates of the card")
    assert "give the file [rates] and [links]" in said
    with pytest.raises(InputError, match=r"(?s)box3.toml: b lacks the card's rates.*give the file \[rates\]"):
        resolve_rehearsal(FitRequest("/model.py", on=str(path), rehearse=True), SOURCE)


SCRIPT = replace(SOURCE, kind="script", path="/home/me/train.py", name="train", script_kind="deepspeed")
SEEN = ModelFacts(
    parameters=10, largest_parameter=10, checkpointing=False, tokens_per_sample=None, has_optimizer=False,
    config={"fp16": {"enabled": True}, "train_batch_size": 64},
)  # fmt: skip


def test_options_win_over_a_scripts_own_config() -> None:
    question = asked(source=SCRIPT, gpus=8, gpu_memory="80GiB")
    assert question.sites[0].base == {}
    (site,) = with_config_of(question, SEEN).sites
    assert (precision_name(site.base), site.global_batch) == ("fp16", 64)
    clipped = asked(source=SCRIPT, gpus=8, gpu_memory="80GiB", base_config={"gradient_clipping": 1.0})
    assert with_config_of(clipped, SEEN).sites[0].base["gradient_clipping"] == 1.0


def test_a_script_without_a_precision_is_said_to_be_fp32() -> None:
    question = asked(source=SCRIPT, gpus=8, gpu_memory="80GiB")
    assert any("fp32" in one for one in with_config_of(question, replace(SEEN, config={})).assumed)
    assert with_config_of(question, replace(SEEN, config=None)) == question


def test_a_script_s_batch_that_cannot_be_split_is_refused() -> None:
    question = asked(source=SCRIPT, gpus=8, gpu_memory="80GiB", micro_batch=5)
    with pytest.raises(InputError, match="micro batch 5 × 8 ranks does not divide the global batch 64"):
        with_config_of(question, SEEN)


def test_how_a_script_builds_its_model_is_not_for_the_command_line() -> None:
    assert "--zero-init has no effect on a training script" in refusal(
        source=SCRIPT, gpus=8, on="a100-80gb", zero_init=True
    )


def test_checkpointing_that_is_kept_is_not_chosen() -> None:
    kept = replace(SCRIPT, keeps_checkpointing=True)
    assert "contradict each other" in refusal(source=kept, gpus=8, on="a100-80gb", checkpointing="on")
    assert asked(source=SCRIPT, gpus=8, on="a100-80gb", checkpointing="on").checkpointing == "on"
