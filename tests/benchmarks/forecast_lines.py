"""Do two simulations tell what a third would? Micro batches between 1 and 61, beside their own simulations.

python tests/benchmarks/forecast_lines.py [--types llama,gpt2,…] [--rungs zero2,zero3-offload] [--sizes 2,13]

The small configs of `causal_lms.py`, one rank of 8 on an A100. For each type and rung: whether every block of the third
simulation is as large as the line has it, and how far the line's step time is off. `simulated` stands where the line
tells no times; then a search simulates its answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from causal_lms import write_config

from autods.config.catalogue import find_machines
from autods.config.rungs import read_rungs
from autods.forecast.interpolation import FAR, draw_line
from autods.forecast.predict.verdict import forecast_speed
from autods.forecast.simulate import ProcessSimulator
from autods.forecast.simulate.protocol import SimulationFailed
from autods.forecast.simulation_cache import make_engine
from autods.forecast.values import EngineSpec, Simulation
from autods.types import Knobs
from tests.support.composed import make_site

ACCUMULATION = 2
TYPES = (
    "llama,gpt2,gpt_neox,bloom,opt,gemma2,qwen3,phi3,mistral,falcon,mixtral,olmoe,deepseek_v3,gpt_oss,qwen3_next,"
    "mamba,bamba"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("--rungs", default="zero2,zero3-offload")
    parser.add_argument("--sizes", default="2,13")
    options = parser.parse_args()
    sizes, wrong = [int(size) for size in options.sizes.split(",")], 0
    for model_type in options.types.split(","):
        for rung in options.rungs.split(","):
            try:
                said, is_right = compare(model_type, rung, sizes)
            except (SimulationFailed, ValueError, KeyError) as error:  # as `causal_lms.py plan` says of some types
                said, is_right = f"not simulated: {' '.join(str(error).split()):.80}", True
            wrong += not is_right
            print(f"{model_type:14} {rung:14} {said}", flush=True)
    return min(wrong, 1)


def compare(model_type: str, rung: str, sizes: list[int]) -> tuple[str, bool]:
    """Return a sentence about the line's answers, and whether all of its blocks are as simulated."""
    (machine,) = find_machines("a100-40gb")
    with (
        tempfile.TemporaryDirectory(prefix="autods-lines-") as folder,
        ProcessSimulator(write_config(model_type, Path(folder))) as simulator,
    ):
        facts = simulator.facts()
        knobs = Knobs(checkpointing=facts.checkpointing, accumulation=ACCUMULATION)
        site = make_site(8, machine=machine, base={"bf16": {"enabled": True}})
        spec = make_engine(site, read_rungs()[rung], knobs, facts)
        first, far, *between = simulator.simulate(spec, (1, FAR, *sizes))
    line = draw_line(first, far)
    if line is None:
        return "no line", True
    said = []
    is_right = True
    for simulated in between:
        reached = line.reach(simulated.micro_batch)
        same = reached.holds_as(simulated) and reached.breakdown == simulated.breakdown
        is_right &= same
        times = step_s(spec, reached) / step_s(spec, simulated) - 1 if line.proves(simulated.micro_batch) else None
        off = "simulated" if times is None else f"{times:+.3%}"
        said.append(f"{simulated.micro_batch}: {'same' if same else 'OTHER'} bytes, time {off}")
    return ", ".join(said), is_right


def step_s(spec: EngineSpec, simulation: Simulation) -> float:
    speed = forecast_speed(spec, simulation, accumulation=ACCUMULATION, tokens_per_sample=1)
    assert speed is not None
    return speed.step.seconds


if __name__ == "__main__":
    sys.exit(main())
