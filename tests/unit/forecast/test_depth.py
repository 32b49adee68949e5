from __future__ import annotations

from dataclasses import replace

import pytest

from autods.forecast.depth import deepened, depths_for, has_room_to_flatten, need_of_deepened
from autods.forecast.memory_model import need_of
from autods.forecast.overheads import read_constants
from autods.forecast.values import Ask, Simulated, Trace
from autods.types import ModelFacts

MIB = 2**20
FACTS = ModelFacts(
    parameters=6_738_415_616, largest_parameter=131_072_000, checkpointing=True, tokens_per_sample=2048,
    has_optimizer=False, layers=32, layer_parameters=202_383_360,
)  # fmt: skip


def ask(stage: int, **limits: int) -> Ask:
    return Ask(
        rung="a", ds_config={"zero_optimization": {"stage": stage, **limits}}, world_size=8, ranks_per_node=8,
        device_bytes=80 * 2**30,
    )  # fmt: skip


def layered(layers: int, *, init: int = 40, forward: int = 30, step: int = 50) -> Simulated:
    """MiB a layer: held from the start in init, and more in each later phase."""
    events, marks = [], []
    for phase, size in (("init", init), ("forward", forward), ("step", step)):
        marks.append((len(events), phase))
        first = sum(event >= 0 for event in events)
        events += [size * MIB] * layers
        events += [-block - 1 for block in range(first, first + layers)]
    trace = Trace(events=events, marks=tuple(marks))  # type: ignore[arg-type]
    live = {phase: {"device": size * layers * MIB, "host": layers * MIB} for phase, size in
            (("init", init), ("forward", forward), ("step", step))}  # fmt: skip
    return Simulated(
        micro_batch=1, live_bytes=live, traces={"device": trace}, nvme_bytes=layers * MIB,  # type: ignore[arg-type]
        breakdown={"parameters": layers * MIB}, optimizer_elements=layers,
    )  # fmt: skip


def bumpy(layers: int) -> Simulated:
    """A step in which first a bucket of 500 MiB comes and goes, then 20 MiB a layer, beside 40 MiB a layer."""
    events = [*[40 * MIB] * layers, 500 * MIB, -layers - 1, *[20 * MIB] * layers]
    events += [-block - 1 for block in (*range(layers), *range(layers + 1, 2 * layers + 1))]
    trace = Trace(events=events, marks=((0, "init"), (layers, "step")))
    live = {"init": {"device": 40 * layers * MIB}, "step": {"device": max(40 * layers + 500, 60 * layers) * MIB}}
    return Simulated(micro_batch=1, live_bytes=live, traces={"device": trace})  # type: ignore[arg-type]


def test_the_depths_lie_beyond_what_stage_3_keeps_gathered() -> None:
    depths = depths_for(ask(3), FACTS)
    assert depths is not None
    assert depths.shallow * FACTS.layer_parameters > 1_000_000_000
    assert depths.shallow + depths.deeper <= FACTS.layers / 2


def test_a_smaller_bucket_lets_shallower_models_tell() -> None:
    many = replace(ask(2), world_size=64)  # so many ranks that it is not their share that decides
    small, large = (
        depths_for(replace(many, ds_config=ask(2, reduce_bucket_size=10**8).ds_config), FACTS),
        depths_for(many, FACTS),
    )
    assert small is not None
    assert large is not None
    assert small.shallow < large.shallow


@pytest.mark.parametrize(
    "facts",
    [
        replace(FACTS, layers=0),
        replace(FACTS, layers=12),
        replace(FACTS, layers=8),
        replace(FACTS, parameters=3 * 10**9),
    ],
)
def test_a_model_that_is_not_deep_or_large_is_only_simulated_whole(facts: ModelFacts) -> None:
    assert depths_for(ask(3), facts) is None


def test_what_grows_by_the_layer_is_foretold_to_the_byte() -> None:
    asked = ask(2)
    depths = depths_for(asked, FACTS)
    assert depths is not None
    whole = deepened(asked, layered(depths.shallow), layered(depths.deeper), depths)
    real = layered(FACTS.layers)
    assert whole.live_bytes == real.live_bytes
    assert (whole.nvme_bytes, whole.optimizer_elements) == (real.nvme_bytes, real.optimizer_elements)
    assert whole.breakdown == real.breakdown
    assert not whole.traces
    assert "estimate" in whole.assumed[-1]


def test_the_bump_that_decides_in_the_whole_model_need_not_decide_in_a_shallow_one() -> None:
    asked = ask(2)
    depths = depths_for(asked, FACTS)
    assert depths is not None
    shallow, deeper, real = (bumpy(layers) for layers in (depths.shallow, depths.deeper, FACTS.layers))
    assert deeper.live_bytes["step"] == {"device": (40 * depths.deeper + 500) * MIB}
    assert deepened(asked, shallow, deeper, depths).live_bytes == real.live_bytes
    assert real.live_bytes["step"] == {"device": 60 * FACTS.layers * MIB}


def test_bumps_are_left_alone_where_the_two_depths_do_not_run_the_same_phases() -> None:
    asked = ask(2)
    depths = depths_for(asked, FACTS)
    assert depths is not None
    shallow, deeper = bumpy(depths.shallow), bumpy(depths.deeper)
    other = replace(deeper, traces={"device": replace(deeper.traces["device"], marks=((0, "step"),))})
    assert deepened(asked, shallow, other, depths).live_bytes["step"]["device"] == (40 * FACTS.layers + 500) * MIB


def test_a_share_lies_in_as_many_tensors_as_that_of_the_whole_model() -> None:
    tight = {"reduce_bucket_size": 10**7}
    rest = FACTS.parameters - FACTS.layers * FACTS.layer_parameters
    depths = depths_for(ask(2, **tight), FACTS)
    assert depths is not None
    assert rest + depths.shallow * FACTS.layer_parameters >= 8 * FACTS.largest_parameter
    one = depths_for(replace(ask(2, **tight), world_size=64), FACTS)  # of 64 ranks, each holds less than one tensor
    assert one is not None
    assert one.shallow < depths.shallow
    assert depths_for(replace(ask(1, **tight), world_size=16), FACTS) is None  # it would take ten layers


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("step", [10, 50])
def test_the_need_of_the_whole_model_is_met_within_3_percent(stage: int, step: int) -> None:
    asked, constants = ask(stage), read_constants()
    depths = depths_for(asked, FACTS)
    assert depths is not None
    shallow, deeper, real = (layered(layers, step=step) for layers in (depths.shallow, depths.deeper, FACTS.layers))
    guessed = need_of_deepened(asked, deepened(asked, shallow, deeper, depths), deeper, constants)
    known = need_of(asked, real, constants, expandable=False)
    assert guessed.device.peak_bytes == pytest.approx(known.device.peak_bytes, rel=0.03)
    assert guessed.host.peak_bytes == pytest.approx(known.host.peak_bytes, rel=0.03)
    assert guessed.nvme == replace(known.nvme, low_bytes=guessed.nvme.low_bytes, high_bytes=guessed.nvme.high_bytes)
    top = max(guessed.by_phase, key=lambda phase: guessed.by_phase[phase])
    assert top == max(known.by_phase, key=lambda phase: known.by_phase[phase])


def test_the_room_to_flatten_is_that_for_a_copy_of_the_parameters() -> None:
    half = replace(ask(2), ds_config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    for asked, least in ((half, 4 * FACTS.parameters), (ask(1), 8 * FACTS.parameters)):
        assert has_room_to_flatten(replace(asked, device_bytes=least), FACTS)
        assert not has_room_to_flatten(replace(asked, device_bytes=least - 1), FACTS)


def test_stage_3_looks_at_no_free_memory() -> None:
    assert has_room_to_flatten(replace(ask(3), device_bytes=2**30), FACTS)
