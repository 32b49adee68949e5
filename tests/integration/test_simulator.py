"""The simulated device with DeepSpeed's real engine on it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from autods.config.checkpointing import INPUTS_ON_HOST
from autods.config.deepspeed import merge, nest_key
from autods.forecast.predict.prices import Work
from autods.forecast.predict.step_time import BITS, CODES, HOST, RUN
from autods.forecast.simulate import ProcessSimulator, SimulatedEngine, SimulationFailed
from autods.forecast.values import EngineSpec, Simulation
from autods.workload import make_source
from tests.support import golden_cases as golden
from tests.support.watching import wait_for

MODEL = """
import torch
from torch import nn
@torch.library.custom_op("autods_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
def make_heads(h, value_size):
    heads = h.sum() * h.new_ones(1, 2, 4096, 192)
    return heads, heads, heads[..., :value_size]
def attend_by_flash(*heads):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        return nn.functional.scaled_dot_product_attention(*heads)
from torch.nn.attention.flex_attention import flex_attention
attend_compiled = torch.compile(flex_attention)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)
    def forward(self, x):
        h = self.first(x)
{lines}
        return self.last(h).pow(2).mean()
def build_model():
    return Model(){moved}
def build_batch(n):
    return {{"x": torch.randn(n, 64)}}
def choose_places(h):
    chosen = h > 0
    places = torch.arange(128, device=h.device).expand(len(h), -1)
    return places[torch.cat([chosen, ~chosen], dim=1)].reshape(h.shape)[:, : chosen.sum(dim=1).max()]
class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.tensor(2.0, device=gradient.device)
"""
# Lines in the forward of one model; the size of the micro batch selects one of them.
PLAIN, RAISES, READS_A_VALUE, HAS_A_MASK = 2, 3, 4, 5
CALLS_AN_OPERATOR, HAS_A_KERNEL, IN_PARTS, DIES = 6, 7, 8, 9
LATENT_HEADS, ONLY_FLASH, MAKES_A_TENSOR_BACKWARD, FLEXES, FLEXES_COMPILED = 10, 11, 12, 13, 14
RECOMPUTES, SPLITS, CHOOSES = 15, 16, 17
MULTIPLIES_TWO_TYPES, NORMS_TWO_TYPES = 18, 19
HAS_A_GRU, HAS_NO_SHAPES = 20, 21
LINES = {
    PLAIN: "pass",
    RAISES: 'raise ValueError("my mistake")',
    READS_A_VALUE: "h = h * 2 if h.sum().item() > 0 else h",
    HAS_A_MASK: "h = h[h[:, 0] > 0]",
    CALLS_AN_OPERATOR: "h = h + torch.ops.autods_test.twice(h.detach())",
    HAS_A_KERNEL: "h = nn.functional.silu(h)",
    IN_PARTS: "h = h * torch.sigmoid(h)",
    DIES: "import ctypes; ctypes.string_at(0)",
    LATENT_HEADS: "h = h + nn.functional.scaled_dot_product_attention(*make_heads(h, 128)).mean()",
    FLEXES: "h = h + flex_attention(*make_heads(h, 192)).mean()",
    FLEXES_COMPILED: "h = h + attend_compiled(*make_heads(h, 192)).mean()",
    ONLY_FLASH: "h = h + attend_by_flash(*make_heads(h.half(), 128)).mean()",
    MAKES_A_TENSOR_BACKWARD: "h = Scale.apply(h)",
    CHOOSES: "h = h + choose_places(h).reshape(h.shape)",
    MULTIPLIES_TWO_TYPES: "h = nn.functional.linear(h.float(), self.last.weight)",
    NORMS_TWO_TYPES: "h = nn.functional.layer_norm(h.float(), (64,), self.last.bias)",
    HAS_A_GRU: "h = torch.gru_cell(h, h, self.first.weight.repeat(3, 1), self.last.weight.repeat(3, 1))",
    HAS_NO_SHAPES: "h = h + torch.nested.nested_tensor([h[0]]).to_padded_tensor(0.0).mean()",
    SPLITS: "h = torch.cat(h.split((h[:2, 0] > 0).long().tolist()))",
    RECOMPUTES: "h = torch.utils.checkpoint.checkpoint(lambda h: h[:, [-1]] + h, h, use_reentrant=False)",
}


def spec_of(rung: str, **changes: object) -> EngineSpec:
    """An engine of a small model on 8 ranks of 16 GiB, with these fields changed."""
    world = int(str(changes.get("world_size", golden.WORLD)))
    spec = EngineSpec(
        rung=rung, ds_config=golden.config_of(rung, accumulation=1, world=world), world_size=world, ranks_per_node=8,
        device_bytes=16 << 30, checkpointing=False,
    )  # fmt: skip
    return replace(spec, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSimulator]:
    source = make_source(golden.workload_file("llama", tmp_path_factory.mktemp("llama"), plain=False))
    with ProcessSimulator(source) as simulator:
        yield simulator


def write_model(folder: Path, lines: str = "", moved: str = "") -> Path:
    path = folder / "model.py"
    path.write_text(MODEL.format(lines=lines, moved=moved))
    return path


class Lines:
    """A simulator of a model with all the lines."""

    def __init__(self, simulator: ProcessSimulator, path: Path) -> None:
        self.simulator, self.path = simulator, path

    def simulate(self, line: int) -> Simulation:
        """Simulate two steps under ZeRO-1 with that line."""
        return self.simulator.simulate(spec_of("zero1"), (line,))[0]

    def place(self, line: int) -> str:
        numbers = [number for number, text in enumerate(self.path.read_text().splitlines(), 1) if LINES[line] in text]
        return f"{self.path}:{numbers[0]}"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lines]:
    text = "\n".join(f"        if len(x) == {size}: {line}" for size, line in LINES.items())
    path = write_model(tmp_path_factory.mktemp("lines"), text)
    with ProcessSimulator(make_source(path)) as simulator:
        yield Lines(simulator, path)


def test_facts_come_without_weights(llama: ProcessSimulator) -> None:
    facts = llama.facts()
    assert facts.largest_parameter == 1000 * 128
    assert facts.checkpointing
    assert facts.tokens_per_sample == 32


def test_a_rank_updates_all_under_ddp_and_its_share_under_zero1(llama: ProcessSimulator) -> None:
    parameters = llama.facts().parameters
    (ddp,), (zero1,) = (llama.simulate(spec_of(rung), (1,)) for rung in ("ddp", "zero1"))
    assert ddp.optimizer_elements == parameters
    assert zero1.optimizer_elements == -(-parameters // golden.WORLD)


def test_states_are_split_over_the_data_parallel_ranks_of_a_mesh(llama: ProcessSimulator) -> None:
    groups = {"sequence_parallel_size": 2, "data_parallel_size": golden.WORLD // 2}
    spec = spec_of("zero1")
    config = {key: value for key, value in spec.ds_config.items() if key != "train_batch_size"}
    (split,) = llama.simulate(replace(spec, ds_config={**config, **groups}), (1,))
    assert split.optimizer_elements == -(-llama.facts().parameters // (golden.WORLD // 2))


def test_offloaded_states_lie_on_the_host_and_pinned(llama: ProcessSimulator) -> None:
    (on_device,), (offloaded,) = (llama.simulate(spec_of(rung), (1,)) for rung in ("zero2", "zero2-offload"))
    assert on_device.live_bytes["step"]["pinned"] == 0
    assert offloaded.live_bytes["step"]["pinned"] >= 4 * offloaded.optimizer_elements
    assert offloaded.live_bytes["step"]["host"] >= 8 * offloaded.optimizer_elements
    assert offloaded.live_bytes["step"]["device"] < on_device.live_bytes["step"]["device"]


def test_inputs_of_layers_wait_in_pinned_memory(llama: ProcessSimulator) -> None:
    spec = spec_of("zero3", checkpointing=True)
    offloaded = replace(spec, ds_config=merge(spec.ds_config, nest_key(INPUTS_ON_HOST, True)))
    (on_device,), (on_host,) = (llama.simulate(each, (64,)) for each in (spec, offloaded))
    held, left = on_device.live_bytes["backward"], on_host.live_bytes["backward"]
    moved_bytes = 3 * 64 * 32 * 128 * 2  # layers, samples, tokens, hidden size
    assert left["pinned"] - held["pinned"] == held["device"] - left["device"] == moved_bytes


def test_swap_files_are_counted_and_not_written(llama: ProcessSimulator) -> None:
    (swapped,) = llama.simulate(spec_of("zero3-nvme", world_size=1), (1,))
    in_groups_of_some_size = 600_000  # elements; what is smaller than 1 MiB stays in memory
    assert swapped.nvme_bytes >= 12 * in_groups_of_some_size
    assert not Path("/nvme").exists()


@pytest.mark.parametrize("rung", ["zero2", "zero3-offload"])
def test_the_order_of_micro_batches_changes_no_answer(llama: ProcessSimulator, rung: str) -> None:
    upwards = llama.simulate(spec_of(rung), (1, 4))
    downwards = llama.simulate(spec_of(rung), (4, 1))
    for first, second in zip(upwards, reversed(downwards), strict=True):
        assert replace(first, seconds=0) == replace(second, seconds=0)


def test_the_traces_replay_to_the_peaks(llama: ProcessSimulator) -> None:
    with llama.engine(spec_of("zero3-offload")) as engine:
        for micro_batch in (1, 2):
            result = engine.measure(micro_batch)
            for tier in ("device", "pinned"):
                now = peak = 0
                sizes: list[int] = []
                for event in result.traces[tier].events:
                    if event >= 0:
                        sizes.append(event)
                    now += event if event >= 0 else -sizes[-event - 1]
                    peak = max(peak, now)
                assert now <= peak == max(tiers[tier] for tiers in result.live_bytes.values())


def test_the_breakdown_adds_up_to_the_peak(llama: ProcessSimulator) -> None:
    (result,) = llama.simulate(spec_of("zero2"), (4,))
    assert sum(result.breakdown.values()) == max(tiers["device"] for tiers in result.live_bytes.values())
    assert result.breakdown["activations"] > 0


def test_thousands_of_ranks_are_simulated_as_few(llama: ProcessSimulator, monkeypatch: pytest.MonkeyPatch) -> None:
    (few,), (many,) = (llama.simulate(spec_of("zero3", world_size=world), (1,)) for world in (8, 8192))
    assert many.optimizer_elements < few.optimizer_elements / 500
    assert many.live_bytes["forward"]["device"] < few.live_bytes["forward"]["device"]


def count_work(simulation: Simulation) -> Counter[Work]:
    """How often each piece of work of the step is launched."""
    schedule, counts = simulation.schedule, Counter[Work]()
    assert schedule is not None
    for event in schedule.events:
        if event & CODES in (RUN, HOST):
            work = schedule.works[event >> BITS]
            counts[replace(work, launches=1)] += work.launches
    return counts


def test_parameters_that_move_cost_python_of_zero3(llama: ProcessSimulator) -> None:
    opcodes = []
    for threshold in (0, 10**9):
        spec = spec_of("zero3")
        zero = spec.ds_config["zero_optimization"] | {"stage3_param_persistence_threshold": threshold}
        (simulation,) = llama.simulate(replace(spec, ds_config=spec.ds_config | {"zero_optimization": zero}), (1,))
        opcodes.append(sum(work.opcodes * count for work, count in count_work(simulation).items()))
    assert opcodes[0] > opcodes[1] > 0


@pytest.fixture(scope="module")
def every_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSimulator]:
    """Llama again, where DeepSpeed makes the views of every rank."""
    source = make_source(golden.workload_file("llama", tmp_path_factory.mktemp("every_rank"), plain=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTODS_EVERY_RANK", "1")
        with ProcessSimulator(source) as simulator:
            yield simulator


@pytest.mark.parametrize("world_size", [8, 24])
def test_views_for_rank_zero_alone_change_no_forecast(
    llama: ProcessSimulator, every_rank: ProcessSimulator, world_size: int
) -> None:
    for rung in ("zero3", "zero3-offload"):
        spec = spec_of(rung, world_size=world_size)
        (alone,), (whole,) = (simulator.simulate(spec, (1,)) for simulator in (llama, every_rank))
        assert alone.traces["device"].events == whole.traces["device"].events
        assert alone.traces["device"].users == whole.traces["device"].users
        assert alone.breakdown == whole.breakdown
        assert count_work(alone) == count_work(whole)


def test_zero_init_needs_less_host_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 1000, **sizes}))
    with ProcessSimulator(make_source(tmp_path, seq_len=32)) as simulator:
        (plain,), (under,) = (
            simulator.simulate(spec_of("zero3", zero_init=zero_init), (1,)) for zero_init in (False, True)
        )
    assert under.live_bytes["build"]["host"] < plain.live_bytes["build"]["host"] / 4
    assert under.live_bytes["init"]["host"] < plain.live_bytes["init"]["host"] / 4


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_precision_is_simulated(llama: ProcessSimulator, precision: str) -> None:
    config = golden.config_of("zero2", accumulation=1, precision=precision)
    (result,), (bf16,) = (llama.simulate(spec, (1,)) for spec in (spec_of("zero2", ds_config=config), spec_of("zero2")))
    assert (result.live_bytes["forward"]["device"] > bf16.live_bytes["forward"]["device"]) == (precision == "fp32")


def test_an_error_of_the_model_is_reported_with_its_line(lines: Lines) -> None:
    with pytest.raises(SimulationFailed, match=rf"{lines.place(RAISES)}: ValueError: my mistake") as failed:
        lines.simulate(RAISES)
    assert failed.value.kind == "user_code"


@pytest.mark.parametrize(
    ("line", "note"), [(READS_A_VALUE, "the value of a tensor is read"), (HAS_A_MASK, "a mask as index")]
)
def test_values_that_the_model_reads_are_assumed_and_noted(lines: Lines, line: int, note: str) -> None:
    simulation = lines.simulate(line)
    assumed = simulation.assumed
    assert simulation.is_upper_bound == (line == HAS_A_MASK)  # the largest size
    assert len(assumed) == 1 + simulation.is_upper_bound
    assert lines.place(line) in assumed[0]
    assert note in assumed[0]


def test_an_operator_without_a_fake_implementation_is_named(lines: Lines) -> None:
    (assumed,) = lines.simulate(CALLS_AN_OPERATOR).assumed
    assert "autods_test.twice" in assumed
    assert "not counted" in assumed


def test_an_operator_of_torch_without_shapes_is_named(lines: Lines) -> None:
    with pytest.raises(SimulationFailed, match=rf"{lines.place(HAS_NO_SHAPES)}: .*aten._nested_tensor") as failed:
        lines.simulate(HAS_NO_SHAPES)
    assert failed.value.kind == "unsupported"


def test_the_cells_of_a_gru_are_simulated(lines: Lines) -> None:
    assert lines.simulate(HAS_A_GRU).optimizer_elements == 1040


class Moved(NamedTuple):
    """A simulated model that moves itself to the GPU, and the file that its process would write by opening NVML."""

    simulation: Simulation
    nvml_opened: Path


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    folder = tmp_path_factory.mktemp("moved")
    opened = folder / "opened"
    (folder / "pynvml.py").write_text(
        "from pathlib import Path\n"
        "class NVMLError(Exception):\n    pass\n"
        f"def nvmlInit():\n    Path({str(opened)!r}).touch()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with ProcessSimulator(make_source(write_model(folder, moved=".cuda()"))) as simulator:
            return Moved(simulator.simulate(spec_of("zero1"), (PLAIN,))[0], opened)


def test_a_model_that_moves_itself_to_the_gpu_is_simulated(lines: Lines, moved: Moved) -> None:
    plain = lines.simulate(PLAIN)
    assert moved.simulation.live_bytes["step"]["device"] == plain.live_bytes["step"]["device"]


def test_no_driver_of_this_machine_is_used(moved: Moved) -> None:
    assert moved.simulation.live_bytes["step"]["device"] > 0
    assert not moved.nvml_opened.exists()


def test_operators_with_a_cuda_kernel_are_not_decomposed(lines: Lines) -> None:
    results = [lines.simulate(line) for line in (HAS_A_KERNEL, IN_PARTS)]
    allocations = [sum(event >= 0 for event in result.traces["device"].events) for result in results]
    assert allocations[0] < allocations[1]


def test_heads_of_latent_attention_need_no_memory_for_scores(lines: Lines) -> None:
    latent, plain = lines.simulate(LATENT_HEADS), lines.simulate(PLAIN)
    assert any(work.name == "_scaled_dot_product_cudnn_attention" for work in count_work(latent))
    added = latent.live_bytes["backward"]["device"] - plain.live_bytes["backward"]["device"]
    assert added < 4096 * 4096 * 4  # of one head


@pytest.mark.parametrize("line", [FLEXES, FLEXES_COMPILED])
def test_flex_attention_is_an_upper_bound(lines: Lines, line: int) -> None:
    simulation = lines.simulate(line)
    assert simulation.live_bytes["backward"]["device"] > 4096 * 4096 * 4  # the scores of a head
    assert simulation.is_upper_bound
    assert sum("torch.compile" in sentence for sentence in simulation.assumed) == 1


def test_attention_without_a_kernel_fails_as_on_a_card(lines: Lines) -> None:
    with pytest.raises(SimulationFailed, match="No available kernel"):
        lines.simulate(ONLY_FLASH)


def test_a_backward_pass_may_make_tensors_of_values(lines: Lines) -> None:
    assert lines.simulate(MAKES_A_TENSOR_BACKWARD).schedule is not None


def test_an_operator_of_the_user_takes_time_by_its_bytes(lines: Lines) -> None:
    schedule = lines.simulate(CALLS_AN_OPERATOR).schedule
    assert schedule is not None
    (work,) = (work for work in schedule.works if work.name == "autods_test::twice")
    assert not work.sure
    assert work.bytes == 2 * CALLS_AN_OPERATOR * 64 * 2  # in and out, of 16 bits


def test_an_index_of_numbers_is_recomputed_in_backward(lines: Lines) -> None:
    assert lines.simulate(RECOMPUTES).optimizer_elements == 1040


def test_a_split_by_unknown_sizes_gives_all_to_the_first(lines: Lines) -> None:
    (assumed,) = (text for text in lines.simulate(SPLITS).assumed if "split" in text)
    assert lines.place(SPLITS) in assumed


@pytest.mark.parametrize("line", [MULTIPLIES_TWO_TYPES, NORMS_TWO_TYPES])
def test_kernels_that_want_one_type_refuse_two_as_on_ranks(lines: Lines, line: int) -> None:
    with pytest.raises(SimulationFailed, match=rf"{lines.place(line)}: .*expected scalar type torch.float32"):
        lines.simulate(line)


def test_a_mask_padded_by_its_negation_has_a_known_size(lines: Lines) -> None:
    simulation = lines.simulate(CHOOSES)
    assert simulation.is_upper_bound
    assert "64 was taken for it" in simulation.assumed[0]


def test_the_next_engine_works_after_one_died(lines: Lines) -> None:
    place = re.escape(lines.place(DIES))
    with pytest.raises(SimulationFailed, match=rf"{place}: .*Segmentation fault") as failed:
        lines.simulate(DIES)
    assert failed.value.kind == "user_code"
    assert lines.simulate(PLAIN).optimizer_elements == 1040


def test_nothing_is_left_running(tmp_path: Path) -> None:
    path = write_model(tmp_path, "        import time; time.sleep(1000)")
    others = worker_pids()
    with ProcessSimulator(make_source(path)) as simulator, simulator.engine(spec_of("zero1")) as engine:
        (group,) = worker_pids() - others
        threading.Thread(target=measure_until_killed, args=(engine,), daemon=True).start()
        wait_for(lambda: len(alive_in(group)) > 1, 60)  # the prepared process and an engine
    wait_for(lambda: alive_in(group) == [], 20)  # the kernel may still be burying them


def measure_until_killed(engine: SimulatedEngine) -> None:
    """Measure on an engine that is killed meanwhile."""
    with contextlib.suppress(SimulationFailed, OSError, ValueError):
        engine.measure(2)


def worker_pids() -> set[int]:
    """The prepared processes that this process has started; each leads a process group."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [pid for child in children for pid in child.read_text().split()]
    return {int(pid) for pid in pids if b"simulate.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def alive_in(group: int) -> list[int]:
    """Processes of that group, without those that are dead and not yet reaped."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group, *_ = stat.read_text().rpartition(")")[2].split()
            pids += [int(stat.parent.name)] if int(process_group) == group and state not in "ZX" else []
    return pids


def with_optimizer(name: str, rung: str = "zero1", **params: object) -> EngineSpec:
    """An engine with that optimizer of `golden_cases`."""
    config = golden.config_of(rung, accumulation=1, optimizer=name)
    if params:
        config["optimizer"]["params"] |= params
    return spec_of(rung, ds_config=config)


def test_the_optimizer_of_the_config_decides_the_states(llama: ProcessSimulator) -> None:
    held = {}
    for name in ("adamw", "sgd", "adagrad", "lion", "lamb"):
        (result,) = llama.simulate(with_optimizer(name), (1,))
        held[name] = result.live_bytes["forward"]["device"]
        state = 4 * result.optimizer_elements
    saved = {name: round((held["adamw"] - size) / state, 1) for name, size in held.items()}
    # In tensors like this rank's share. Adagrad makes its state with the optimizer, before ZeRO partitions the
    # parameters: DeepSpeed makes another one and keeps the first, which is 2 bytes a parameter of all eight shares.
    assert saved == {"adamw": 0, "sgd": 1, "adagrad": 1 - 4, "lion": 1, "lamb": 0}


def test_a_gpu_takes_the_foreach_form_of_torchs_optimizers(llama: ProcessSimulator) -> None:
    """Unless the config names another one, as that of autods does: the fused step needs no temporary."""
    parameters = llama.facts().parameters
    config = golden.config_of("ddp", accumulation=1, precision="fp32")
    assert config["optimizer"]["params"].pop("fused")
    step = []
    for form in ({}, {"foreach": True}, {"foreach": False}, {"fused": True}):
        (result,) = llama.simulate(spec_of("ddp", ds_config=merge(config, {"optimizer": {"params": form}})), (1,))
        step.append(result.live_bytes["step"]["device"])
    default, foreach, one_by_one, fused = step
    assert default == foreach
    assert foreach - one_by_one > 2 * parameters  # one temporary for all of them, not for one at a time
    assert foreach - fused == pytest.approx(4 * parameters, rel=0.01)


def test_muons_compiled_update_runs_as_written_with_a_note(llama: ProcessSimulator) -> None:
    (result,) = llama.simulate(with_optimizer("muon"), (1,))
    assert any("Muon" in sentence for sentence in result.assumed)


def test_an_untested_optimizer_names_the_key_that_allows_it(llama: ProcessSimulator) -> None:
    untested = with_optimizer("sgd")
    config = {key: value for key, value in untested.ds_config.items() if key != "zero_allow_untested_optimizer"}
    with pytest.raises(SimulationFailed, match=r'optimizer SGD.*\n.*"zero_allow_untested_optimizer": true') as failed:
        llama.simulate(replace(untested, ds_config=config), (1,))
    assert failed.value.kind == "engine"


def test_a_compiled_op_of_unknown_memory_is_refused(llama: ProcessSimulator) -> None:
    config = golden.config_of("zero3", accumulation=1, world=16)
    config["zero_optimization"]["zero_quantized_gradients"] = True
    with pytest.raises(SimulationFailed, match=r"function quantizer\.swizzle_quant is not simulated") as failed:
        llama.simulate(spec_of("zero3", ds_config=config, world_size=16), (1,))
    assert failed.value.kind == "unsupported"


def test_quantized_weights_halve_what_is_gathered(llama: ProcessSimulator) -> None:
    def count_gathered(result: Simulation) -> int:
        works = count_work(result).items()
        return sum(work.bytes * count for work, count in works if work.name.startswith("allgather"))

    spec = spec_of("zero3", world_size=16)
    config = merge(spec.ds_config, nest_key("zero_optimization.zero_quantized_weights", True))
    (plain,), (quantized,) = (llama.simulate(each, (1,)) for each in (spec, replace(spec, ds_config=config)))
    assert count_gathered(quantized) == pytest.approx(count_gathered(plain) / 2, rel=0.02)
    for state in ("parameters", "gradients", "optimizer"):
        assert quantized.breakdown[state] == plain.breakdown[state]
    names = {work.name for work in count_work(quantized)}
    assert {"quantizer.quantize", "quantizer.dequantize"} <= names
    assert not quantized.assumed


@pytest.fixture(scope="module")
def with_adafactor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessSimulator]:
    """Llama with torch's Adafactor and an attention mask, which holds padding where the micro batch is even."""
    path = golden.workload_file(
        "llama", tmp_path_factory.mktemp("with_adafactor"), plain=False, optimizer="own-adafactor"
    )
    text = path.read_text().replace("padded=None", "padded=micro_batch % 2 == 0")
    path.write_text(text)
    with ProcessSimulator(make_source(path)) as simulator:
        yield simulator


def test_the_states_of_the_users_optimizer_are_counted(
    llama: ProcessSimulator, with_adafactor: ProcessSimulator
) -> None:
    """Adafactor keeps a row and a column of each matrix; ZeRO's flat partitions have none, and it keeps them whole."""
    for rung, saved in (("ddp", 2), ("zero1", 1)):
        (adamw,) = llama.simulate(spec_of(rung), (1,))
        (adafactor,) = with_adafactor.simulate(with_optimizer("own-adafactor", rung), (1,))
        less = adamw.live_bytes["forward"]["device"] - adafactor.live_bytes["forward"]["device"]
        assert round(less / (4 * adamw.optimizer_elements), 1) == saved


def test_masks_take_memory_with_padding_and_a_note_without(with_adafactor: ProcessSimulator) -> None:
    padded, *plain = with_adafactor.simulate(with_optimizer("own-adafactor"), (4, 3, 5))
    forward = [result.live_bytes["forward"]["device"] for result in plain]
    assert padded.live_bytes["forward"]["device"] > sum(forward) / 2
    assert padded.assumed == ()
    assert all("attention_mask holds no padding" in result.assumed[0] for result in plain)
