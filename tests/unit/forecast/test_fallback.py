"""Without a compiler there is no simulated GPU: estimates by formula, which say so."""

from __future__ import annotations

import pytest

from autods.forecast.fallback import WithFormulas, activation_bytes, unsharded
from autods.forecast.formulas import ASSUMED
from autods.forecast.scripted import Scripted, allocates
from autods.forecast.simulator import SimulationFailed
from autods.forecast.values import Ask, Simulated, Trace
from autods.forecast.verdict import judged
from autods.types import Device, ModelFacts

MIB = 2**20
FACTS = ModelFacts(
    parameters=100 * MIB, largest_parameter=MIB, checkpointing=True, tokens_per_sample=1, has_optimizer=False
)
ASK = Ask(
    rung="zero2", ds_config={"zero_optimization": {"stage": 2, "reduce_bucket_size": MIB}, "fp16": {"enabled": True}},
    world_size=8, ranks_per_node=8, device_bytes=2**34,
)  # fmt: skip


def a_cpu_rank(ask: Ask, micro_batch: int) -> Simulated:
    """5 MiB live before the forward pass, which adds 7 a sample."""
    assert ask.device == "cpu"
    events = (5 * MIB, 7 * MIB * micro_batch, -2, 3 * MIB)
    marks = ((0, "init"), (1, "forward"), (2, "backward"))
    return Simulated(
        micro_batch=micro_batch, live_bytes={}, traces={"device": Trace(events=events, marks=marks)},
        assumed=("something of the model",),
    )  # fmt: skip


class Bare(Scripted):
    """A machine without a compiler."""

    kind = "no_compiler"

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts:
        if device == "cuda":
            raise SimulationFailed(kind=self.kind, what="no g++", hint="apt-get install g++")
        return self.known


def test_estimates_come_from_the_formulas_over_the_activations_of_a_cpu_rank() -> None:
    bare = Bare(FACTS, a_cpu_rank)
    one, two = WithFormulas(bare).simulate(ASK, (1, 2))
    assert two.live_bytes["forward"]["device"] - one.live_bytes["forward"]["device"] == 7 * MIB
    # 2 bytes a parameter, and 12 for an eighth of them.
    assert one.live_bytes["forward"]["device"] == (200 + 150 + 7) * MIB
    assert [(ask.device, ask.world_size) for ask in bare.engines] == [("cpu", 1)]


def test_an_estimate_says_what_it_is_why_and_what_would_mend_it() -> None:
    (found,) = WithFormulas(Bare(FACTS, a_cpu_rank)).simulate(ASK, (1,))
    assert found.assumed == (ASSUMED, "no g++: apt-get install g++", "something of the model")
    assert not judged(ASK, found, limits={"device": 2**34}).exact


def test_with_a_compiler_the_simulated_gpu_answers() -> None:
    exact = Simulated(
        micro_batch=1, live_bytes={"step": {"device": MIB}},
        traces={"device": Trace(events=(MIB,), marks=((0, "step"),))},
    )  # fmt: skip
    whole = Scripted(FACTS, lambda ask, micro_batch: exact)
    assert WithFormulas(whole).simulate(ASK, (1,)) == (exact,)
    assert whole.engines == [ASK]
    assert judged(ASK, exact, limits={"device": 2**34}).exact


class AmongItsRanks(Scripted):
    """A script with a fixed number of devices, which does not run on one rank."""

    def facts(self, device: Device = "cuda", *, ranks: int = 1) -> ModelFacts:
        if ranks != 8:
            raise SimulationFailed(kind="user_code", what="devices=8 does not match the world size")
        return self.known


def test_what_was_looked_at_among_its_ranks_is_not_looked_at_alone_again() -> None:
    simulator = WithFormulas(AmongItsRanks(FACTS, lambda ask, micro_batch: allocates(micro_batch, init=MIB)))
    simulator.facts(ranks=8)
    (found,) = simulator.simulate(ASK, (1,))
    assert found.live_bytes["init"]["device"] == MIB


def test_what_is_wrong_with_the_workload_is_passed_on() -> None:
    class Broken(Bare):
        kind = "user_code"

    with pytest.raises(SimulationFailed, match="no g\\+\\+"):
        WithFormulas(Broken(FACTS, a_cpu_rank)).simulate(ASK, (1,))


def test_the_cpu_rank_trains_in_the_same_precision_without_anything_moved_or_split() -> None:
    plain = unsharded(ASK).ds_config
    assert plain["bf16"] == {"enabled": True}
    assert plain["zero_optimization"] == {"stage": 0}


def test_activations_are_what_the_forward_pass_adds_at_most() -> None:
    trace = Trace(events=(10, 20, 30, -2, 5, 100), marks=((0, "init"), (1, "forward"), (5, "backward")))
    assert activation_bytes(trace) == 50
