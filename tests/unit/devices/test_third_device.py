"""A further device is one value and its registration: everything else follows from it."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autods.devices import CPU, CUDA, DEVICES, Card, CardReading, Device
from autods.errors import InputError
from autods.forecast.predict.memory_model import compute_rank_memory, read_overheads
from autods.forecast.values import EngineSpec, Simulation, Trace
from autods.rank import distributed
from autods.rank.job import RankJob
from autods.rank.memory import CpuMeter, make_meter
from autods.runner.environment import choose_exported, zygote_environment
from autods.runner.placement import Need
from autods.system.host import read_hardware
from autods.types import WorkloadSource
from tests.support.machines import SOURCE, a_machine
from tests.support.settings import fit_settings

GIB = 2**30
CARD = Card(index=0, name="NPU-1", total_bytes=32 * GIB, free_bytes=32 * GIB)


class NpuMeter(CpuMeter):
    """Measures nothing else than a CPU's."""


class Npu(Device):
    """A device whose driver lists two cards."""

    def read_cards(self) -> CardReading:
        return CardReading(cards=(CARD, replace(CARD, index=1)), driver="7.1")


NPU = Npu(
    name="npu",
    backend="hccl",
    has_cards=True,
    card_noun="NPU",
    ray_resource="NPU",
    shares_host_memory=False,
    has_caching_allocator=True,
    constants="cuda",
    meter=f"{__name__}:NpuMeter",
    variables={"DS_ACCELERATOR": "npu"},
    default_variables={"NPU_LOG": "warn"},
    visible_variable="NPU_VISIBLE",
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEVICES, "npu", NPU)


def test_its_cards_are_those_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DEVICES, "cuda")
    here = read_hardware()
    assert ([card.name for card in here.cards], here.driver) == (["NPU-1", "NPU-1"], "7.1")


def test_a_fit_takes_all_its_cards_and_their_memory() -> None:
    settings = fit_settings(SOURCE, hardware=a_machine(2, gib=32, name="NPU-1"), device="npu")
    assert (settings.device, settings.gpus, settings.device_bytes) == ("npu", 2, 32 * GIB)
    assert not settings.is_limited
    assert settings.platform[0] == "NPU-1, 32 GiB"
    assert "-2xnpu-" in settings.out.name


def test_a_machine_without_its_cards_is_refused_in_its_words() -> None:
    with pytest.raises(InputError, match="no NPU is visible on this machine"):
        fit_settings(SOURCE, hardware=a_machine(0), device="npu")


def test_rays_resource_of_its_name_is_reserved() -> None:
    settings = fit_settings(SOURCE, hardware=a_machine(2), device="npu", address="10.0.0.1:6379", gpus=2, nodes=1)
    need = Need.of_settings(settings)
    assert (need.bundle, str(need)) == ({"CPU": 1.0, "NPU": 2.0}, "2 NPUs on one node")
    assert need.actor_options == {"num_cpus": 1.0, "num_gpus": 0.0, "resources": {"NPU": 2.0}}


def test_its_ranks_get_its_variables_and_rays_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_VISIBLE", "0,1")
    environment = zygote_environment("npu", {"NPU_VISIBLE": "1,0", "DS_ACCELERATOR": "cuda", "NPU_LOG": "info"})
    assert {name: environment[name] for name in ("NPU_VISIBLE", "DS_ACCELERATOR", "NPU_LOG")} == {
        "NPU_VISIBLE": "1,0",
        "DS_ACCELERATOR": "npu",
        "NPU_LOG": "info",
    }
    assert "NPU_VISIBLE" not in choose_exported({"NPU_VISIBLE": "0"}, ())


def test_its_ranks_talk_through_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: list[str] = []
    join = SimpleNamespace(init_distributed=lambda dist_backend, **rest: backends.append(dist_backend))
    monkeypatch.setitem(sys.modules, "deepspeed", join)  # type: ignore[arg-type]
    monkeypatch.setattr(distributed, "choose_store", lambda job, store: None)
    source = WorkloadSource(kind="file", path="/model.py", name="model", digest="1")
    distributed.join(
        RankJob(job="train", source=source, device="npu", folder="/f", scratch="/s", world_size=1, local_ranks=(0,)),
        None,
    )
    assert backends == ["hccl"]


def test_its_meter_is_made_by_name() -> None:
    meter = make_meter("npu", 5, 1)
    assert isinstance(meter, NpuMeter)
    assert (meter.limit_bytes, meter.local_rank) == (5, 1)


@pytest.mark.parametrize(("like", "unlike"), [(CUDA, CPU), (CPU, CUDA)], ids=["cuda", "cpu"])
def test_its_forecast_has_the_allocator_that_it_names(
    like: Device, unlike: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu = replace(NPU, has_caching_allocator=like.has_caching_allocator, constants=like.constants)
    monkeypatch.setitem(DEVICES, "npu", npu)
    spec = EngineSpec(
        rung="ddp", ds_config={"zero_optimization": {"stage": 0}}, world_size=2, ranks_per_node=2,
        device_bytes=8 * GIB, device="npu",
    )  # fmt: skip
    trace = Trace(events=(3 * 2**20 + 1, 30 * 2**20, ~0, 5 * 2**20), marks=((0, "forward"),))
    run = Simulation(micro_batch=1, live_bytes={"forward": {"device": 35 * 2**20}}, traces={"device": trace})
    memory = {
        device.name: compute_rank_memory(replace(spec, device=device.name), run, read_overheads(), expandable=False)
        for device in (npu, like, unlike)
    }
    assert memory["npu"] == memory[like.name]
    assert memory["npu"] != memory[unlike.name]
