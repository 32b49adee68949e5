"""The cache of simulations: what was simulated is not simulated again, also beside other threads."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest

from autods.config.catalogue import find_machines
from autods.config.rungs import read_rungs
from autods.forecast import simulation_cache as cache_module
from autods.forecast.simulation_cache import (
    AllocConf,
    SimulationCache,
    list_limits,
    make_engine,
    read_alloc_conf,
)
from autods.forecast.testing import ScriptedSimulator, simulate_peaks
from autods.forecast.values import EngineSpec, Simulation
from autods.system.host import HostMemory
from autods.types import Knobs
from tests.support.composed import FACTS, make_site

GIB = 2**30
ENGINE = make_engine(make_site(2), read_rungs()["zero1"], Knobs(), FACTS)


def grows(spec: EngineSpec, micro_batch: int) -> Simulation:
    return simulate_peaks(micro_batch, init=GIB, backward=2 * GIB + micro_batch * GIB)


@pytest.mark.parametrize(("cores", "free_bytes", "engines"), [(1, 64 * GIB, 2), (64, 5 * GIB, 5), (16, 64 * GIB, 16)])
def test_cores_and_memory_bound_how_many_engines_run(
    cores: int, free_bytes: int, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(total_bytes=64 * GIB, free_bytes=free_bytes)
    monkeypatch.setattr(cache_module, "count_cores", lambda: cores)
    monkeypatch.setattr(cache_module, "read_host_memory", lambda groups: memory)
    assert cache_module.count_parallel_engines() == engines


def test_an_engine_starts_when_something_has_to_be_simulated() -> None:
    simulator = ScriptedSimulator(FACTS, grows)
    cache = SimulationCache(simulator)
    with cache.open(ENGINE) as engine:
        forecast = engine.forecast(1)
    with cache.open(ENGINE) as engine:
        assert engine.forecast(1) == forecast
        assert len(simulator.engines) == 1
        engine.simulate(2)  # needs another one
    assert len(simulator.engines) == 2


def test_one_thread_lists_while_another_simulates() -> None:
    cache, stop, errors = SimulationCache(ScriptedSimulator(FACTS, grows)), threading.Event(), list[Exception]()

    def list_again_and_again() -> None:
        try:
            while not stop.is_set():
                cache.list_simulated(ENGINE)
        except RuntimeError as error:  # a dictionary changed its size
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    reader = threading.Thread(target=list_again_and_again)
    reader.start()
    try:
        for micro_batch in range(1500):
            cache.keep(ENGINE, micro_batch, simulate_peaks(1))
    finally:
        stop.set()
        reader.join()
        sys.setswitchinterval(interval)
    assert not errors


def test_an_engine_knows_all_of_its_site() -> None:
    (machine,) = find_machines("a100-80gb")
    site = make_site(8, machine=machine, base={"wandb": {"enabled": True}, "bf16": {"enabled": True}})
    engine = make_engine(site, read_rungs()["zero3"], Knobs(accumulation=8, micro_batch=4), FACTS, zero_init=True)
    assert (engine.machine, engine.capability) == (machine, (8, 0))
    assert (engine.device_bytes, engine.zero_init) == (machine.device_bytes, True)
    assert engine.ds_config["gradient_accumulation_steps"] == 2  # further micro batches allocate the same
    assert "wandb" not in engine.ds_config
    known = {"device": machine.device_bytes, "host": machine.host_bytes, "nvme": machine.nvme_bytes}
    assert list_limits(engine) == known
    assert list_limits(replace(engine, device="cpu")) == {tier: known[tier] for tier in ("device", "nvme")}


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_only_an_unset_allocator_of_a_card_leaves_segments_open(variable: str) -> None:
    cases = {
        "": None,
        "max_split_size_mb:64": None,
        "expandable_segments:False": False,
        "backend:cudaMallocAsync": False,
    }
    assert {value: read_alloc_conf({variable: value}, "cuda").expandable for value in cases} == cases
    assert read_alloc_conf({}, "cpu").expandable is False


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_read_from_either_variable(variable: str) -> None:
    assert read_alloc_conf({variable: "expandable_segments:True"}, "cuda") == AllocConf(
        variable=variable, expandable=True
    )
    assert not read_alloc_conf({variable: "expandable_segments:False"}, "cuda").expandable


def test_the_new_variable_replaces_the_old_one() -> None:
    both = {"PYTORCH_ALLOC_CONF": "backend:native", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert not read_alloc_conf(both, "cuda").expandable


def test_settings_that_are_not_modelled_cause_a_warning() -> None:
    settings = "max_split_size_mb:128, roundup_power2_divisions:[256:1,>:8],expandable_segments: True"
    conf = read_alloc_conf({"PYTORCH_CUDA_ALLOC_CONF": settings}, "cuda")
    assert conf.expandable
    assert conf.unmodelled == ("max_split_size_mb", "roundup_power2_divisions")
    assert conf.warning is not None
    assert "PYTORCH_CUDA_ALLOC_CONF: max_split_size_mb, roundup_power2_divisions" in conf.warning


def test_an_empty_variable_is_as_if_it_were_not_set() -> None:
    assert read_alloc_conf({"PYTORCH_ALLOC_CONF": ""}, "cuda") == AllocConf()
    assert AllocConf().warning is None


def test_another_allocator_causes_a_warning() -> None:
    assert "backend" in str(read_alloc_conf({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "cuda").warning)
