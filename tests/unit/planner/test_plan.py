from __future__ import annotations

import math
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from autods.config.catalogue import Machine
from autods.config.checkpointing import offloads_inputs
from autods.config.deepspeed import get_key
from autods.errors import EnvironmentBroken, InputError, Interrupted
from autods.forecast.predict.prices import Work
from autods.forecast.predict.step_time import BITS, HOST, Schedule
from autods.forecast.simulate import SimulationFailed
from autods.forecast.simulation_cache import SimulationCache
from autods.forecast.testing import Script, ScriptedSimulator, fail_with, simulate_peaks
from autods.forecast.values import EngineSpec, ForecastPhase, RungFinished, RungForecast, Simulation, Trace
from autods.planner.plan import join_assumptions, plan
from autods.planner.rung_forecasts import group_sites, make_group_engine
from autods.report.answers.plan import make_plan_document
from autods.report.results.plan import AnswerSoFar
from autods.types import ModelFacts
from tests.support.planned import FACTS, GIB, NEEDS, SOURCE, Planned, question, shrinking
from tests.support.plans import rung
from tests.support.terminal import printed


def test_the_fastest_rung_that_fits_is_the_best() -> None:
    planned = Planned(question(largest=False))
    verdicts = planned.verdicts()
    assert list(verdicts) == list(NEEDS)
    assert verdicts["ddp"] == "cannot_fit"
    assert verdicts["zero2-offload"] == "fits"
    assert verdicts["zero3-nvme"] == "not_applicable"
    site = planned.forecast.sites[0]
    assert site.best is not None
    assert site.best.verdict == "fits"
    fitting = [rung.rung for rung in site.rungs if rung.verdict == "fits"]
    assert site.best_rung == fitting[0]
    assert planned.forecast.status == "fits"


def building(ask: EngineSpec, micro_batch: int) -> Simulation:
    """Each rank holds 100 GiB of host memory while it builds, and 20 GiB where the model is split meanwhile."""
    return simulate_peaks(micro_batch, init=GIB, backward=10 * GIB, host=(20 if ask.zero_init else 100) * GIB)


def test_a_plan_proposes_zero_init_where_the_host_lacks() -> None:
    planned = Planned(question(ladder=("zero2", "zero3"), largest=False), building)
    build = planned.forecast.sites[0].partitioned
    assert build is not None
    assert (build.rung, build.verdict, build.tier, build.ranks, build.obstacle) == ("zero3", "fits", "host", 8, None)
    assert build.whole_bytes == pytest.approx(800 * GIB, rel=0.1)
    assert build.split_bytes == pytest.approx(160 * GIB, rel=0.1)
    assert build.limit_bytes == 512 * GIB
    assert planned.forecast.status == "nothing_fits"


@pytest.mark.parametrize(
    ("asked", "gib"),
    [({"zero_init": True}, 100), ({"host_memory": "2TiB"}, 100), ({"gpu_memory": "9GiB"}, 100), ({}, 500)],
    ids=["it was asked for", "it fits", "the device lacks", "it would not fit either"],
)
def test_no_split_build_is_proposed_where_it_gives_nothing(asked: dict[str, Any], gib: int) -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        return simulate_peaks(micro_batch, init=GIB, backward=10 * GIB, host=gib * GIB)

    planned = Planned(question(ladder=("zero3",), largest=False, **asked), script)
    assert planned.forecast.sites[0].partitioned is None


def test_a_model_that_refuses_to_be_split_is_said_to() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        if ask.zero_init:
            raise SimulationFailed("user_code", "build_model uses a weight", hint="set it in its __init__")
        return building(ask, micro_batch)

    build = Planned(question(ladder=("zero3",), largest=False), script).forecast.sites[0].partitioned
    assert build is not None
    assert (build.split_bytes, build.obstacle) == (None, "build_model uses a weight: set it in its __init__")


@pytest.mark.parametrize(("host", "proposed"), [(100, True), (1, False)], ids=["whole", "split already"])
def test_a_script_is_told_to_split_the_model_it_builds(host: int, proposed: bool) -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        return simulate_peaks(micro_batch, build=GIB // 8, backward=10 * GIB, host=host * GIB)

    source = replace(SOURCE, kind="script", script_kind="deepspeed")
    asked = replace(question(ladder=("zero3",), largest=False, host_memory=f"{4 * host}GiB"), source=source)
    build = Planned(asked, script).forecast.sites[0].partitioned
    assert (build is not None) is proposed
    if build is not None:
        assert build.obstacle is not None
        assert "deepspeed.zero.Init" in build.obstacle


def timed(ask: EngineSpec, micro_batch: int) -> Simulation:
    """As `shrinking`, with a schedule. Without checkpointing a sample takes twice the memory and 3/4 of the time."""
    samples = micro_batch if ask.checkpointing else 2 * micro_batch
    flops = 1e12 * (1 + micro_batch) * (1 if ask.checkpointing else 0.75)
    work = Work(kind="matmul", flops=flops, dtype="bfloat16")
    return replace(shrinking(ask, samples), micro_batch=micro_batch, schedule=Schedule(events=(0,), works=(work,)))


def test_the_best_rung_has_its_other_settings() -> None:
    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero2", "zero3")), timed)
    site = planned.forecast.sites[0]
    assert site.best is not None
    assert site.best.speed is not None
    smaller, larger, switched = site.alternatives
    assert smaller.forecast.micro_batch < site.best.speed.micro_batch < larger.forecast.micro_batch
    assert (smaller.forecast.verdict, smaller.switched, larger.switched) == ("fits", False, False)
    assert larger.forecast.fill > 1
    assert (switched.switched, switched.checkpointing) == (True, False)
    assert switched.forecast.speed is not None
    assert 2 * switched.forecast.micro_batch == pytest.approx(site.best.speed.micro_batch, abs=2)
    assert switched.forecast.speed.samples_per_second > site.best.speed.samples_per_second


def test_other_settings_need_few_simulations() -> None:
    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero3",)), timed)
    on = sum(spec.checkpointing for spec in planned.simulator.engines)
    assert (on, len(planned.simulator.engines)) == (2, 3)  # one without accumulation, one without checkpointing
    assert len(planned.simulator.measured) <= 8


def test_a_model_that_recomputes_by_itself_has_no_switch() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        return timed(replace(ask, checkpointing=True), micro_batch)

    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero3",)), script)
    assert not any(alternative.switched for alternative in planned.forecast.sites[0].alternatives)


def test_another_setting_that_fails_beside_a_rung_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autods.planner.plan.count_parallel_engines", lambda: 2)

    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        if not ask.checkpointing:
            raise SimulationFailed(kind="user_code", problem="no")
        return timed(ask, micro_batch)

    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero2", "zero3"), largest=False), script)
    assert planned.forecast.status == "fits"
    assert not any(alternative.switched for alternative in planned.forecast.sites[0].alternatives)


def gathering(ask: EngineSpec, micro_batch: int) -> Simulation:
    """A step that waits for its gathers, of half the bytes where weights are quantized."""
    share = 0.5 if ask.ds_config["zero_optimization"].get("zero_quantized_weights") else 1
    work = Work(kind="collective", name="allgather_base", bytes=int(share * 10**10), ranks=16, stride=1)
    simulation = simulate_peaks(micro_batch, init=GIB, backward=10 * GIB)
    return replace(simulation, schedule=Schedule(events=(0,), works=(work,)))


@pytest.mark.parametrize(("gpus", "nodes", "times"), [(16, 2, 1), (8, 1, 0)])
def test_a_plan_bound_by_the_network_names_its_way_out(gpus: int, nodes: int, times: int) -> None:
    asked = question(on="a100-40gb", gpus=gpus, nodes=nodes, ladder=("zero3",), largest=False, checkpointing="on")
    planned = Planned(asked, gathering)
    (site,) = planned.forecast.sites
    assert (site.best_rung, len(site.rungs)) == ("zero3", 1)
    by_name = [each for each in site.alternatives if each.opt_in]
    assert [each.forecast.rung for each in by_name] == ["zero3-quantized-weights"] * times
    text = printed(make_plan_document(planned.forecast), 400)
    said = "zero3-quantized-weights: 1.99 × the tokens/s; only by name (--with zero3-quantized-weights): weights cross"
    assert text.count(said) == times


def offloading(ask: EngineSpec, micro_batch: int) -> Simulation:
    """A step that waits for the host's optimizer. The smaller its share, the more lies on the card."""
    ratio = get_key(ask.ds_config, "zero_optimization.offload_optimizer.ratio") or 1.0
    work = Work(kind="host_optimizer", name="cpu_adam", bytes=int(ratio * 10**11))
    simulation = simulate_peaks(micro_batch, init=GIB, backward=int((80 - 60 * ratio) * GIB))
    return replace(simulation, schedule=Schedule(events=(0,), works=(work,)))


def test_a_plan_bound_by_the_host_names_the_least_share_that_fits() -> None:
    asked = question(on="a100-40gb", gpus=8, ladder=("zero3-offload-optimizer",), largest=False, checkpointing="on")
    planned = Planned(asked, offloading)
    (site,) = planned.forecast.sites
    assert [each.forecast.rung for each in site.alternatives if each.opt_in] == ["zero3-partial-offload-80"]


def test_without_a_time_no_other_setting_is_simulated() -> None:
    planned = Planned(question(ladder=("zero3",)), timed)
    assert planned.forecast.sites[0].alternatives == ()
    assert all(spec.checkpointing for spec in planned.simulator.engines)


def holding_inputs(ask: EngineSpec, micro_batch: int) -> Simulation:
    """30 GiB, and 20 of layers' inputs for each sample where they are not on the host; the step waits for the host."""
    inputs = 0 if offloads_inputs(ask.ds_config) else 20 * micro_batch
    simulation = simulate_peaks(micro_batch, init=GIB, backward=(29 + micro_batch + inputs) * GIB)
    works = (Work(kind="matmul", flops=1e12 * micro_batch, dtype="bfloat16"), Work(kind="host", bytes=10**9))
    return replace(simulation, schedule=Schedule(events=(1 << BITS | HOST, 0), works=works))


@pytest.mark.parametrize(
    ("asked", "verdict"), [({}, "fits"), ({"checkpointing": "on"}, "cannot_fit"), ({"device": "cpu"}, "cannot_fit")]
)
def test_inputs_of_layers_go_to_the_host_where_a_rung_lacks_them(asked: dict[str, Any], verdict: str) -> None:
    planned = Planned(question(ladder=("zero3",), largest=False, **asked), holding_inputs)
    (rung,) = planned.forecast.sites[0].rungs
    assert (rung.verdict, rung.offloads_inputs) == (verdict, verdict == "fits")
    assert any("wait on the host" in sentence for sentence in planned.forecast.assumed) == (verdict == "fits")


@pytest.mark.parametrize("on_host", [True, False])
def test_a_base_config_says_where_inputs_of_layers_are(on_host: bool) -> None:
    """DeepSpeed's own key for it, "activation_checkpointing": {"cpu_checkpointing": true}."""
    base = {"activation_checkpointing": {"cpu_checkpointing": on_host}}
    planned = Planned(question(ladder=("zero3",), largest=False, base_config=base), holding_inputs)
    (rung,) = planned.forecast.sites[0].rungs
    assert (rung.verdict, rung.offloads_inputs) == ("fits" if on_host else "cannot_fit", on_host)
    assert not any("wait on the host" in sentence for sentence in planned.forecast.assumed)


def test_a_plan_says_what_larger_batches_by_offload_give() -> None:
    planned = Planned(question(on="a100-80gb", gpus=8, ladder=("zero3",)), holding_inputs)
    (site,) = planned.forecast.sites
    assert site.best is not None
    offloaded = next(each for each in site.alternatives if each.forecast.offloads_inputs)
    assert offloaded.switched
    assert offloaded.forecast.micro_batch > site.best.micro_batch
    assert "(--checkpointing offload)" in printed(make_plan_document(planned.forecast), 200)


def keeping(ask: EngineSpec, micro_batch: int) -> Simulation:
    """20 GiB; a sample adds 1, and 2 for each of ten layers that keeps its activations. Recomputing takes a third."""
    every = int(ask.checkpointing)
    part = math.ceil(10 / every) / 10 if every else 0.0
    held_bytes = 20 * GIB + micro_batch * (GIB + round(2 * GIB * 10 * (1 - part)))
    simulation = simulate_peaks(micro_batch, init=GIB, backward=held_bytes)
    work = Work(kind="matmul", flops=1e12 * micro_batch * (1 + part / 3), dtype="bfloat16")
    return replace(simulation, schedule=Schedule(events=(0,), works=(work,)))


def test_a_plan_names_the_fastest_share_of_recomputed_layers() -> None:
    facts = replace(FACTS, alike_layers=10)
    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero3",)), keeping, facts)
    shares = [each for each in planned.forecast.sites[0].alternatives if each.checkpointing > 1]
    assert [each.checkpointing for each in shares] == [4]
    assert "with every-4 activation checkpointing" in printed(make_plan_document(planned.forecast), 200)
    assert sum(spec.checkpointing > 1 for spec in planned.simulator.engines) == 1


def test_tokens_of_images_are_refused() -> None:
    facts = replace(FACTS, tokens_per_sample=None)
    with pytest.raises(InputError, match="--tokens: the tokens of this workload's samples are not known"):
        Planned(question(on="a100-40gb", tokens="1B"), facts=facts)


def test_a_rung_has_the_speed_of_its_largest_micro_batch() -> None:
    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero3",)), timed)
    (rung,) = planned.forecast.sites[0].rungs
    assert rung.speed is not None
    assert rung.speed.micro_batch == rung.largest_micro_batch
    assert rung.speed.tokens_per_second == pytest.approx(1024 * rung.speed.samples_per_second)
    samples = rung.speed.micro_batch * rung.speed.accumulation * 8
    assert rung.speed.samples_per_second == pytest.approx(samples / rung.speed.step.seconds)


def test_each_rung_is_reported_when_it_is_done() -> None:
    planned = Planned(question(largest=False))
    done = [event for event in planned.events if isinstance(event, RungFinished)]
    assert {event.forecast.rung for event in done} == set(NEEDS)
    assert max(event.done for event in done) == done[0].total == 9


def test_the_answer_so_far_is_told_before_the_last_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autods.planner.plan.count_parallel_engines", lambda: 1)
    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("ddp", "zero1", "zero3")), timed)
    (told,) = [event for event in planned.events if isinstance(event, AnswerSoFar)]
    (site,), final = told.report.sites, planned.forecast.sites[0]
    assert ([each.rung for each in site.rungs], site.best_rung, told.left) == (["ddp", "zero1"], "zero1", 1)
    assert site.best == final.rungs[1]  # with its largest micro batch and its speed
    assert site.best is not None
    assert site.best.largest_micro_batch is not None


@pytest.mark.parametrize(
    "asked",
    [{"ladder": ("zero3",)}, {"gpu_memory": "2GiB"}, {"on": "a100-40gb,a100-80gb", "gpus": 8}],
    ids=["one rung", "nothing fits", "several machines"],
)
def test_no_answer_so_far_is_told_where_none_helps(asked: dict[str, Any]) -> None:
    assert not [event for event in Planned(question(**asked)).events if isinstance(event, AnswerSoFar)]


def slow_on(rung: str, ask: EngineSpec, micro_batch: int) -> Simulation:
    """As `timed`, but a sample takes nine times as long on one rung."""
    work = Work(kind="matmul", flops=1e12 * micro_batch * (9 if ask.rung == rung else 1), dtype="bfloat16")
    return replace(timed(ask, micro_batch), schedule=Schedule(events=(0,), works=(work,)))


def test_the_best_rungs_neighbours_do_not_wait_for_the_rest() -> None:
    switched = threading.Event()

    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        if ask.rung == "zero3":
            assert switched.wait(20)  # the last rung ends after the first one's neighbour has begun
        elif not ask.checkpointing:
            switched.set()
        return slow_on("zero3", ask, micro_batch)

    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero1", "zero3")), script)
    site = planned.forecast.sites[0]
    assert site.best_rung == "zero1"
    assert [each.checkpointing for each in site.alternatives if each.switched] == [False]


def test_neighbours_are_those_of_the_rung_that_wins_at_last() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        if ask.rung == "zero3":
            time.sleep(0.3)  # zero1's are searched meanwhile
        return slow_on("zero1", ask, micro_batch)

    planned = Planned(question(on="a100-40gb", gpus=8, ladder=("zero1", "zero3")), script)
    site = planned.forecast.sites[0]
    assert site.best_rung == "zero3"
    assert site.alternatives
    assert {each.forecast.rung for each in site.alternatives} == {"zero3"}
    assert site.unaccumulated is not None
    assert site.unaccumulated.rung == "zero3"


def test_one_engine_serves_a_rung_and_its_search() -> None:
    planned = Planned(question(ladder=("zero3",), base_config={"gradient_accumulation_steps": 2}))
    (rung,) = planned.forecast.sites[0].rungs
    assert len(planned.simulator.engines) == 1
    assert rung.largest_micro_batch is not None
    measured = [batch for _, batch in planned.simulator.measured]
    assert len(measured) == len(set(measured)) <= 3
    (spec,) = planned.simulator.engines
    spec, cache = replace(spec, expandable=rung.expandable), SimulationCache(planned.simulator)
    at, above = (planned.simulator.script(spec, rung.largest_micro_batch + more) for more in (0, 1))
    assert cache.judge(spec, at).fill <= 1 < cache.judge(spec, above).fill
    assert 30 < rung.largest_micro_batch < 60  # (40 − 10) GiB, half a GiB a sample, less what the runtime holds


@pytest.mark.parametrize("machines", [{}, {"on": "a100-40gb,a100-80gb,h200-141gb", "gpus": 8}])
def test_a_plan_is_the_same_whichever_simulation_ends_first(machines: dict[str, Any]) -> None:
    def answers(*slow: str) -> list[tuple[RungForecast, ...]]:
        def script(ask: EngineSpec, micro_batch: int) -> Simulation:
            time.sleep(0.01 if ask.rung in slow else 0)
            sample_mib = 50 + 7 * list(NEEDS).index(ask.rung) + micro_batch / 5  # peaks bend, by rung
            backward = int(NEEDS[ask.rung] * GIB + sample_mib * micro_batch * 2**20)
            return simulate_peaks(micro_batch, init=GIB, backward=backward)

        return [site.rungs for site in Planned(question(**machines), script).forecast.sites]

    expected = answers()
    assert any((rung.largest_micro_batch or 0) > 100 for rungs in expected for rung in rungs)
    for slow in (("zero1",), ("zero2",), ("zero2-offload",), ("zero1", "zero3"), ("zero2", "zero3-offload-param")):
        assert answers(*slow) == expected


def test_the_largest_micro_batch_may_be_below_the_requested_one() -> None:
    (rung,) = Planned(question(ladder=("zero3",), micro_batch=128)).forecast.sites[0].rungs
    assert rung.verdict == "cannot_fit"
    assert rung.largest_micro_batch is not None
    assert rung.largest_micro_batch < 128


@pytest.mark.parametrize("kind", ["user_code", "crashed"])
def test_a_batch_that_cannot_be_simulated_bounds_the_search(kind: str) -> None:
    def little_data(ask: EngineSpec, micro_batch: int) -> Simulation:
        if micro_batch > 5:
            fail_with(kind, "its data ends")(ask, micro_batch)
        return shrinking(ask, micro_batch)

    (rung,) = Planned(question(ladder=("zero3",)), little_data).forecast.sites[0].rungs
    assert (rung.verdict, rung.largest_micro_batch) == ("fits", 5)
    assert "zero3: micro batch 6 was not simulated: its data ends" in rung.assumed


def test_no_search_is_made_without_largest() -> None:
    planned = Planned(question(largest=False))
    assert {batch for _, batch in planned.simulator.measured} == {1}
    assert all(rung.largest_micro_batch is None for rung in planned.forecast.sites[0].rungs)


def test_that_nothing_fits_is_a_result() -> None:
    planned = Planned(question(gpu_memory="2GiB", largest=False))
    assert planned.forecast.status == "nothing_fits"
    assert planned.forecast.sites[0].best is None


def test_a_rung_that_cannot_be_simulated_says_so_and_the_others_go_on() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        if ask.rung == "zero1":
            raise SimulationFailed(kind="engine", problem="AssertionError: zero1 is out of order" + " again" * 100)
        return shrinking(ask, micro_batch)

    planned = Planned(question(largest=False), script)
    rungs = {rung.rung: rung for rung in planned.forecast.sites[0].rungs}
    assert rungs["zero1"].verdict == "not_applicable"
    assert rungs["zero1"].reason.startswith("could not be simulated: AssertionError: zero1 is out of order again")
    assert len(rungs["zero1"].reason) < 250
    assert rungs["zero2-offload"].verdict == "fits"


def test_what_deepspeed_refuses_is_told_by_the_file_that_holds_it() -> None:
    asked = question(base_config={"zero_optimization": {"reduce_bucket_size": -5}})
    message = "ValidationError: 1 validation error for Z reduce_bucket_size Input should be greater [type=greater_than]"
    with pytest.raises(InputError, match=r"^ds.json: zero_optimization.reduce_bucket_size: Input should be greater; "):
        Planned(replace(asked, config_place="ds.json"), fail_with("engine", message))
    with pytest.raises(InputError, match=r"^ValueError: CUDA is gone"):
        Planned(replace(asked, config_place="ds.json"), fail_with("engine", "ValueError: CUDA is gone"))


def test_the_first_failure_ends_a_plan_without_any_simulation() -> None:
    with pytest.raises(InputError, match="refused"):
        Planned(question(), fail_with("engine", "ValueError: refused"))


@pytest.mark.parametrize("kind", ["user_code", "data_dependent", "unsupported"])
def test_a_fault_of_the_workload_ends_the_plan_with_its_place(kind: str) -> None:
    with pytest.raises(InputError) as caught:
        Planned(question(), fail_with(kind, "NameError: x", place="model.py:3", hint="define x"))
    assert str(caught.value) == "model.py:3: NameError: x\n  define x"


def test_code_that_fails_with_split_parameters_has_other_rungs() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        if ask.rung.startswith("zero3"):
            fail_with("user_code", "ValueError: no positions", place="train.py:9")(ask, micro_batch)
        return timed(ask, micro_batch)

    planned = Planned(question(ladder=("zero2", "zero3"), largest=False), script)
    zero2, zero3 = planned.forecast.sites[0].rungs
    assert (zero2.verdict, zero3.verdict) == ("fits", "not_applicable")
    assert "could not be simulated: train.py:9: ValueError: no positions" in str(zero3.reason)


def test_a_model_that_needs_more_samples_gets_a_hint() -> None:
    said = "Expected more than 1 value per channel when training, got input size torch.Size([1, 64])"
    with pytest.raises(InputError, match="--micro-batch 2"):
        Planned(question(), fail_with("user_code", said, place="model.py:3", hint="real trials measure it"))


def test_a_missing_compiler_is_a_broken_environment() -> None:
    with pytest.raises(EnvironmentBroken, match="g\\+\\+"):
        Planned(question(), fail_with("no_compiler", "no C++ compiler", hint="apt-get install g++"))


def test_ctrl_c_is_an_interrupt() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with pytest.raises(Interrupted):
        Planned(question(), script)
    for thread in set(threading.enumerate()) - before:  # they end, too
        thread.join(20)
        assert not thread.is_alive()


def test_checkpointing_is_on_where_the_model_supports_it() -> None:
    assert Planned(question(largest=False)).simulator.engines[0].checkpointing
    cannot = replace(FACTS, checkpointing=False)
    planned = Planned(question(largest=False), facts=cannot)
    assert not planned.simulator.engines[0].checkpointing
    assert any("no gradient checkpointing" in said for said in planned.forecast.assumed)
    with pytest.raises(InputError, match="gradient_checkpointing_enable"):
        Planned(question(checkpointing="on"), facts=cannot)
    assert not Planned(question(checkpointing="off", largest=False)).simulator.engines[0].checkpointing


def test_accumulation_is_no_longer_than_what_changes_memory() -> None:
    planned = Planned(question(global_batch=1024, largest=False))
    asked = {ask.rung: ask.ds_config["gradient_accumulation_steps"] for ask in planned.simulator.engines}
    longer = {rung for rung, accumulation in asked.items() if accumulation == 3}
    assert longer == {"zero2-offload", "zero3-offload-optimizer", "zero3-offload"}
    assert set(asked.values()) == {2, 3}


def test_machines_with_the_same_ranks_share_one_simulation_of_a_rung() -> None:
    planned = Planned(question(on="a100-40gb,a100-80gb,h200-141gb", gpus=8, largest=False))
    asked = [(ask.rung, offloads_inputs(ask.ds_config)) for ask in planned.simulator.engines]
    assert len(asked) == len(set(asked))
    assert [site.site.machine.name for site in planned.forecast.sites] == ["a100-40gb", "a100-80gb", "h200-141gb"]
    assert any("share simulations" in said for said in planned.forecast.assumed)
    assert planned.verdicts(2)["ddp"] == "fits"
    assert planned.verdicts(0)["ddp"] == "cannot_fit"


def test_a_machine_gets_no_rungs_below_the_first_that_fits() -> None:
    planned = Planned(question(on="a100-40gb,h200-141gb", gpus=8, largest=False))
    assert list(planned.verdicts(1)) == ["ddp"]


def test_of_several_machines_only_the_best_rung_of_each_is_searched() -> None:
    planned = Planned(question(on="a100-40gb,h200-141gb", gpus=8))
    for site in planned.forecast.sites:
        assert site.best is not None
        assert site.best.largest_micro_batch is not None
        others = [rung for rung in site.rungs if rung.rung != site.best_rung]
        assert all(rung.largest_micro_batch is None for rung in others)


def test_a_card_is_simulated_alone_where_deepspeed_would_branch() -> None:
    # Flattened on the device, init needs 50 GiB: on the smaller card DeepSpeed flattens in host memory instead.
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        init = 50 if ask.device_bytes > 60 * GIB else 12
        return simulate_peaks(micro_batch, init=init * GIB, backward=20 * GIB)

    planned = Planned(question(on="a100-40gb,a100-80gb", gpus=8, ladder=("zero1",), largest=False), script)
    assert len(planned.simulator.engines) == 2
    assert planned.verdicts(0) == {"zero1": "fits"}


@pytest.mark.parametrize(("init", "engines"), [(37, 1), (39, 2)])
def test_deepspeed_branches_on_what_the_context_leaves(init: int, engines: int) -> None:
    # Of the smaller card's 39.38 GiB, the CUDA context and NCCL take one.
    planned = Planned(
        question(on="a100-40gb,a100-80gb", gpus=8, ladder=("zero1",), largest=False),
        lambda ask, micro_batch: simulate_peaks(micro_batch, init=init * GIB, backward=20 * GIB),
    )
    assert len(planned.simulator.engines) == engines


def test_no_second_simulation_where_another_phase_decides() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        return simulate_peaks(micro_batch, init=50 * GIB, backward=70 * GIB)

    planned = Planned(
        question(on="a100-40gb,a100-80gb", gpus=8, ladder=("zero1",), largest=False, checkpointing="on"), script
    )
    assert len(planned.simulator.engines) == 1
    assert planned.verdicts(0) == {"zero1": "cannot_fit"}


def test_machines_of_other_ranks_or_precision_are_simulated_apart() -> None:
    sites = question(on="t4-16gb,v100-16gb,a100-80gb").sites
    assert [[site.machine.name for site in group] for group in group_sites(sites)] == [
        ["t4-16gb"], ["v100-16gb"], ["a100-80gb"],
    ]  # fmt: skip


def accumulated(ask: EngineSpec, micro_batch: int) -> Simulation:
    """A rung with 4 GiB more where a step accumulates."""
    kept = 4 if ask.ds_config["gradient_accumulation_steps"] > 1 else 0
    return simulate_peaks(micro_batch, init=GIB, backward=int((NEEDS[ask.rung] + kept + micro_batch / 2) * GIB))


def test_memory_is_judged_with_accumulation_until_none_is_asked() -> None:
    def peak(**said: Any) -> int:
        (site,) = Planned(question(ladder=("zero2",), largest=False, **said), accumulated).forecast.sites
        return site.rungs[0].memory["device"].peak_bytes

    unsaid, none, one, four = (
        peak(), peak(global_batch=8), peak(base_config={"gradient_accumulation_steps": 1}), peak(global_batch=32),
    )  # fmt: skip
    assert unsaid == four
    assert none == one < unsaid


def test_a_plan_says_what_accumulation_costs() -> None:
    planned = Planned(question(ladder=("zero1", "zero2"), largest=False), accumulated)
    text = printed(make_plan_document(planned.forecast), 200)
    assert "accumulation costs zero2 4.0 GiB of device memory for gradients" in text
    assert "at micro batch 1 (--global-batch 8)" in text
    assert "micro batch 1 × accumulation 2 × 8 ranks = global batch 16" in text
    assert any(sentence.startswith("accumulation 2: ") for sentence in planned.forecast.assumed)
    for said in ({"global_batch": 8}, {"global_batch": 16}, {"base_config": {"gradient_accumulation_steps": 2}}):
        asked = Planned(question(ladder=("zero2",), largest=False, **said), accumulated)
        assert asked.forecast.sites[0].unaccumulated is None
        assert len(asked.simulator.engines) == 1
        assert not any(sentence.startswith("accumulation") for sentence in asked.forecast.assumed)


@pytest.mark.parametrize("held", [{}, {0: 4, 2: 9}])
def test_a_plan_says_whether_the_allocator_runs_full(held: dict[int, int]) -> None:
    def simulate(ask: EngineSpec, micro_batch: int) -> Simulation:
        step = [(20 * GIB, ~0, 20 * GIB, ~1), (20 * GIB, ~2, 20 * GIB, ~3, GIB)]
        marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "forward"), (4, "step"), (4, "forward"), (9, "step"))
        trace = Trace(events=[*step[0], *step[1]], marks=marks, held=held)  # a step's first block waits for a stream
        return replace(simulate_peaks(micro_batch), live_bytes={}, traces={"device": trace})

    planned = Planned(question(ladder=("zero2",), largest=False), simulate)
    (site,) = planned.forecast.sites
    assert site.runs_full == bool(held)
    text = printed(make_plan_document(planned.forecast), 200)
    assert ("zero2's allocator should run full in each step" in text) == bool(held)


def simulate_start(**peaks_gib: tuple[int, int]) -> Script:
    """Each rank holds the first size of a tier while its engine starts, and the second in a step."""

    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        device, host = peaks_gib["device"], peaks_gib.get("host", (1, 1))
        lives = {
            phase: {"device": device[place] * GIB, "host": host[place] * GIB}
            for place, phase in enumerate(("init", "backward"))
        }
        simulated = simulate_peaks(micro_batch, host=max(host) * GIB, init=device[0] * GIB, backward=device[1] * GIB)
        return replace(simulated, live_bytes=lives)

    return script


def print_plan(script: Script, *ladder: str, **said: Any) -> str:
    return printed(make_plan_document(Planned(question(ladder=ladder, largest=False, **said), script).forecast), 900)


def test_a_plan_says_where_building_decides() -> None:
    on_device, on_host = simulate_start(device=(34, 10)), simulate_start(device=(10, 10), host=(56, 4))
    text = print_plan(on_device, "zero3")
    assert "building the whole model in each rank decides the memory of zero3" in text
    assert "as --zero-init does" in text
    assert "zero3: the host of a node holds" in print_plan(on_host, "zero3")
    for script in (on_device, on_host):
        assert Planned(question(ladder=("zero3",), largest=False), script).forecast.sites[0].built_whole == ("zero3",)
        assert "building" not in print_plan(script, "zero2", "zero3")  # zero2 is recommended, and zero3 fits
        assert "building" not in print_plan(script, "zero3", zero_init=True)


@pytest.mark.parametrize(
    "script",
    [
        simulate_start(device=(1, 10)),
        simulate_start(device=(20, 10)),  # half of the card is free
        simulate_start(device=(34, 33)),
        simulate_start(device=(10, 10), host=(2, 1)),
    ],
)
def test_a_split_build_is_not_advised_where_it_changes_little(script: Script) -> None:
    planned = Planned(question(ladder=("zero3",), largest=False), script).forecast
    assert planned.sites[0].status == "fits"
    assert planned.sites[0].built_whole == ()
    assert "--zero-init" not in printed(make_plan_document(planned), 900)


def test_a_split_build_is_no_way_where_steps_lack_memory() -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        host = (4, 72) if ask.rung == "zero3" else (1, 1)  # 8 ranks have 512 GiB
        return simulate_start(device=(36, 10) if ask.rung == "zero3" else (1, 10), host=host)(ask, micro_batch)

    (site,) = Planned(question(ladder=("zero2", "zero3"), largest=False), script).forecast.sites
    assert [rung.verdict for rung in site.rungs] == ["fits", "cannot_fit"]
    assert site.built_whole == ()


@pytest.mark.parametrize(
    ("kind", "rung", "ways"),
    [
        ("file", "ddp", ("from_pretrained(dtype=torch.bfloat16)", "while a rank builds the model")),
        ("file", "zero2", ("from_pretrained(dtype=torch.bfloat16)", "one rank at a time")),
        ("hf_config", "zero3", ("--zero-init", "a model.py with from_pretrained")),
        ("script", "zero3", ("HfDeepSpeedConfig(ds_config) was made, and while it is kept", "torch.bfloat16")),
    ],
)
def test_a_plan_says_how_a_node_loads_with_less(kind: Any, rung: str, ways: tuple[str, ...]) -> None:
    def script(ask: EngineSpec, micro_batch: int) -> Simulation:
        whole_bytes = 4 * FACTS.parameters
        lives = {"build": {"host": whole_bytes}, "init": {"device": GIB}, "backward": {"device": 4 * GIB, "host": GIB}}
        return replace(simulate_peaks(micro_batch, build=0, init=GIB, backward=4 * GIB), live_bytes=lives)

    source = replace(SOURCE, kind=kind, script_kind="deepspeed" if kind == "script" else None)
    ranks = 1 if rung == "ddp" else 8
    asked = replace(question(ladder=(rung,), largest=False, gpus=ranks, host_memory=f"{12 * ranks}GiB"), source=source)
    planned = Planned(asked, script).forecast
    text = printed(make_plan_document(planned), 900)
    assert f"{rung}: the host of a node holds" in text
    assert ranks == 1 or "while 8 ranks build the model" in text
    assert f" × {'1 rank' if ranks == 1 else '8 ranks'} = global batch" in text
    assert all(way in text for way in ways)
    loading = planned.sites[0].loading
    assert loading is not None
    assert (loading.whole, loading.in_fp32, loading.ranks) == (True, True, ranks)


def test_an_engine_spec_holds_the_whole_config() -> None:
    asked = question(nvme="1TiB", zero_init=True, checkpointing="off")
    group = asked.sites
    asks = [make_group_engine(rung, asked.sites[0], asked, FACTS, group) for rung in asked.ladder]
    assert all(isinstance(ask, EngineSpec) for ask in asks)
    nvme = asks[-1]
    assert isinstance(nvme, EngineSpec)
    assert nvme.ds_config["zero_optimization"]["offload_param"]["nvme_path"] == "/local_nvme"
    assert nvme.ds_config["train_batch_size"] == 16  # two micro batches on each of 8 ranks
    assert (nvme.zero_init, nvme.checkpointing, nvme.device_bytes) == (True, False, 40 * GIB)
    ddp = asks[0]
    assert isinstance(ddp, EngineSpec)
    assert not ddp.zero_init


def test_a_bucket_that_overrules_the_base_config_is_reported() -> None:
    zero = {"stage": 3, "stage3_max_live_parameters": 3e10, "reduce_bucket_size": 1000, "overlap_comm": True}
    planned = Planned(question(ladder=("zero3",), base_config={"zero_optimization": zero}, largest=False))
    (said,) = [said for said in planned.forecast.assumed if "base config's" in said]
    assert "zero3: stage3_max_live_parameters" in said
    assert "not the base config's 30,000,000,000" in said
    assert planned.simulator.engines[0].ds_config["zero_optimization"]["reduce_bucket_size"] == 1000


def test_as_written_keeps_the_configs_own_buckets() -> None:
    zero = {"stage3_max_live_parameters": 3e10}
    ladder = ("zero3", "zero3-nvme")
    planned = Planned(
        question(ladder=ladder, base_config={"zero_optimization": zero}, as_written=True, nvme="1TiB", largest=False)
    )
    configs = {engine.rung: engine.ds_config["zero_optimization"] for engine in planned.simulator.engines}
    written, nvme = (configs[rung] for rung in ladder)
    assert written["stage3_max_live_parameters"] == 3e10
    assert "reduce_bucket_size" not in written  # DeepSpeed's own
    assert nvme["offload_param"]["buffer_size"] * 8 >= FACTS.largest_parameter  # or DeepSpeed stops
    assert not [said for said in planned.forecast.assumed if "base config's" in said]


class Crowd(ScriptedSimulator):
    """Of a script that insists on its number of ranks."""

    def facts(self, device: str = "cuda", *, ranks: int = 1, machine: Machine | None = None) -> ModelFacts:
        if ranks == 1:
            raise SimulationFailed(kind="user_code", problem="ValueError: devices=8 does not match the world size (1)")
        return self.known


def test_a_script_may_be_read_on_all_of_its_ranks() -> None:
    asked, told = question(), []
    script = replace(asked, source=replace(SOURCE, kind="script", path="/home/me/train.py"))
    found = plan(script, listen=told.append, start=lambda source: nullcontext(Crowd(FACTS, shrinking)))
    assert found.facts == FACTS
    assert any("its model is read on 8" in getattr(one, "text", "") for one in told)


class Broken(Crowd):
    """Of a script that fails on any number of ranks."""

    def facts(self, device: str = "cuda", *, ranks: int = 1, machine: Machine | None = None) -> ModelFacts:
        return super().facts(device)


def test_a_script_that_fails_on_all_ranks_is_not_read_there() -> None:
    told: list[object] = []
    script = replace(question(), source=replace(SOURCE, kind="script", path="/home/me/train.py"))
    with pytest.raises(InputError, match="devices=8"):
        plan(script, listen=told.append, start=lambda source: nullcontext(Broken(FACTS, shrinking)))
    assert not [one for one in told if "its model is read" in getattr(one, "text", "")]


def test_a_model_whose_facts_fail_is_not_read_twice() -> None:
    with pytest.raises(InputError, match="devices=8"):
        plan(question(), listen=lambda event: None, start=lambda source: nullcontext(Crowd(FACTS, shrinking)))


def fixed(ask: EngineSpec, micro_batch: int) -> Simulation:
    """A script whose loader has a size of its own, and which takes none."""
    if micro_batch != 2:
        raise SimulationFailed("user_code", "its batches hold 2 samples", own_batch=2)
    return shrinking(ask, micro_batch)


def test_a_plan_takes_the_batch_that_a_script_fixes() -> None:
    planned = Planned(question(), fixed)
    site = planned.forecast.sites[0]
    assert {rung.micro_batch for rung in site.rungs if rung.memory} == {2}
    assert planned.forecast.status == "fits"
    said = [sentence for sentence in planned.forecast.assumed if "micro batch" in sentence]
    assert said == ["micro batch 2, which the script fixes (--micro-batch); a larger one was not searched"]
    assert {micro_batch for _, micro_batch in planned.simulator.measured} == {1, 2}


def test_a_micro_batch_that_was_asked_for_is_not_replaced() -> None:
    with pytest.raises(InputError, match="its batches hold 2 samples"):
        Planned(question(micro_batch=4), fixed)


def test_rungs_that_assume_the_same_share_a_sentence() -> None:
    forecasts = [
        rung("zero2", 1, verdict="fits", assumed=("zero2: takes segments", "sequences of 8")),
        rung("zero3", 1, verdict="fits", assumed=("zero3: takes segments", "sequences of 8", "zero3: alone")),
    ]
    assert join_assumptions(forecasts) == ("zero2, zero3: takes segments", "sequences of 8", "zero3: alone")


def test_lines_that_assume_the_same_share_a_sentence() -> None:
    read = ("train.py:31: a value is read", "train.py:9: a value is read", "train.py:9: a mask", "loss.py:9: a mask")
    forecasts = [rung("zero2", 1, verdict="fits", assumed=read)]
    assert join_assumptions(forecasts) == ("train.py:9, 31: a value is read", "train.py:9: a mask", "loss.py:9: a mask")
