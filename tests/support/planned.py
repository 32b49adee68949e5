"""Plans of a scripted simulator."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from autods.config.plan_settings import PlanSettings
from autods.forecast.testing import Script, ScriptedSimulator, simulate_peaks
from autods.forecast.values import EngineSpec, Simulation
from autods.planner.plan import plan
from autods.report.results.plan import PlanEvent, PlanReport
from autods.system.host import Hardware
from autods.types import ModelFacts, WorkloadSource
from tests.support.settings import plan_settings

GIB = 2**30


LAPTOP = Hardware(cpu="a CPU", cores=4, host_bytes=16 * GIB, host_free_bytes=8 * GIB, cards=())


SOURCE = WorkloadSource(kind="file", path="/home/me/model.py", name="model", digest="abc")


FACTS = ModelFacts(
    parameters=10**9, largest_parameter=10**7, checkpointing=True, tokens_per_sample=1024, has_optimizer=False
)


NEEDS = {
    "ddp": 60, "zero1": 30, "zero2": 26, "zero2-offload": 14, "zero3": 10, "zero3-offload-optimizer": 8,
    "zero3-offload-param": 9, "zero3-offload": 5, "zero3-nvme": 5,
}  # fmt: skip


def shrinking(ask: EngineSpec, micro_batch: int) -> Simulation:
    """GiB by rung, and half of one more for each sample."""
    return simulate_peaks(micro_batch, init=GIB, backward=int((NEEDS[ask.rung] + micro_batch / 2) * GIB))


def question(**said: Any) -> PlanSettings:
    if "on" not in said:
        said = {"gpus": 8, "gpu_memory": "40GiB", "host_memory": "512GiB", **said}
    return plan_settings(SOURCE, hardware=LAPTOP, **said)


class Planned:
    """A plan on a scripted simulator: what it said, what it was asked, what it told while it worked."""

    def __init__(self, asked: PlanSettings, script: Script = shrinking, facts: ModelFacts = FACTS) -> None:
        self.simulator = ScriptedSimulator(facts, script)
        self.events: list[PlanEvent] = []
        self.forecast: PlanReport = plan(
            asked, listen=self.events.append, start=lambda source: nullcontext(self.simulator)
        )

    def verdicts(self, machine: int = 0) -> dict[str, str]:
        return {rung.rung: rung.verdict for rung in self.forecast.sites[machine].rungs}
