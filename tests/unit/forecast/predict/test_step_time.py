"""The clocks of streams and of the host: overlap, waits, what bounds a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autods.config.catalogue import Links, Machine, Measured, Rates, Tflops, read_catalogue
from autods.forecast.predict import step_time as codes
from autods.forecast.predict.prices import Constants, Efficiency, Price, PriceList, Unpriced, Work, read_constants
from autods.forecast.predict.step_time import BITS, STREAM_BITS, Schedule, StepTime, forecast_step

_PERFECT = Efficiency(
    matmul_traffic=1, fp32_matmul=1, unaligned=1, unaligned_from_hopper=1, attention=1, attention_half_intensity=0,
    cudnn_attention=1, cudnn_half_intensity=0, efficient_attention=1,
    memory=1, reduction=1, nvlink=1, pcie_between_gpus=1, network=1, contention=0,
    collective_traffic=0, pinned_copy=1, pageable_copy=0.5, dram=1, core_gb_per_s=100, first_touch_gb_per_s=100,
    compare_ns=0, host_optimizer=1, nvme=1, launch_us=1e-6, view_us=1e-6, opcode_ns=1e-3, collective_us=1e-6,
    return_us=1e-6, kernel_us=1e-6, first_step_us=1e-6, step_us=1e-6, network_step_us=1e-6, pipeline=0, unsure=1,
)  # fmt: skip
_EXACT = Constants(efficiency=_PERFECT, low=1, high=1, launch_high=1, host_high=1, unsure_high=1, sources={})
# A card of 1 TFLOP/s and 1 GB/s, and a node whose every other path has 1 GB/s, too.
_MACHINE = Machine(
    name="slow",
    title="slow",
    device_bytes=1,
    dram_gb_per_s=1,
    nvme_gb_per_s=1,
    rates=Rates(
        multiprocessors=1,
        memory_gb_per_s=1,
        source="made up",
        tflops=Tflops(fp32=1, bf16=1),
        matmul_share=1.0,
        attention_share=1.0,
    ),
    links=Links(
        over_pcie=False,
        between_gpus="NVLink",
        between_gpus_gb_per_s=2,
        to_host="PCIe",
        to_host_gb_per_s=1,
        network_gb_per_s=0.5,
    ),
)
_WORKS = (
    Work(kind="matmul", flops=1e12, dtype="bfloat16"),
    Work(kind="collective", bytes=2 * 10**9, ranks=2),
    Work(kind="kernel", bytes=10**9),
    Work(kind="host_optimizer", bytes=10**9),
    Work(kind="view"),
)
_MATMUL, _COLLECTIVE, _KERNEL, _OPTIMIZER, _VIEW = range(len(_WORKS))


def _run(work: int) -> int:
    return work << BITS | codes.RUN


def _switch(stream: int) -> int:
    return stream << BITS | codes.SWITCH


def _record(number: int, stream: int) -> int:
    return (number << STREAM_BITS | stream) << BITS | codes.RECORD


def _wait(number: int, stream: int) -> int:
    return (number << STREAM_BITS | stream) << BITS | codes.WAIT


def _replay(*events: int, efficiency: Efficiency = _PERFECT, accumulation: int = 1) -> StepTime:
    prices = PriceList(machine=_MACHINE, ranks_per_node=2, efficiency=efficiency)
    schedule = Schedule(events=events, works=_WORKS)
    return forecast_step(schedule, prices, _EXACT, accumulation=accumulation)


def _price(work: Work, **changes: float) -> Price:
    return PriceList(machine=_MACHINE, ranks_per_node=2, efficiency=replace(_PERFECT, **changes)).price(work)


def test_work_on_one_stream_runs_in_turn() -> None:
    step = _replay(_run(_MATMUL), _run(_KERNEL))
    assert step.seconds == pytest.approx(2)
    assert step.spent["compute"] == pytest.approx(1)
    assert step.spent["memory"] == pytest.approx(1)


def test_two_streams_overlap() -> None:
    step = _replay(_run(_MATMUL), _switch(1), _run(_COLLECTIVE), _switch(0), _run(_MATMUL))
    assert step.seconds == pytest.approx(2)
    assert step.spent["communication"] == pytest.approx(0, abs=1e-6)


def test_a_wait_for_a_collective_is_communication() -> None:
    events = (_switch(1), _run(_COLLECTIVE), _run(_COLLECTIVE), _record(1, 1), _switch(0), _wait(1, 0), _run(_KERNEL))
    step = _replay(*events)
    assert step.seconds == pytest.approx(3)
    assert step.bound == "communication"
    assert step.spent["communication"] == pytest.approx(2)


def test_work_after_a_collective_does_not_hide_it() -> None:
    gather = (_switch(2), _run(_COLLECTIVE), _run(_COLLECTIVE), _run(_COLLECTIVE), _record(1, 2))
    copied = (_switch(1), _wait(1, 1), _run(_KERNEL), _record(2, 1))
    step = _replay(*gather, *copied, _switch(0), _wait(2, 0))
    assert step.seconds == pytest.approx(4)
    assert step.bound == "communication"


def test_a_second_short_wait_does_not_hide_the_first() -> None:
    """As where numbers and their scales are gathered one after the other, and then dequantized."""
    works = (*_WORKS, Work(kind="collective", bytes=10**7, ranks=2))
    gather = (_switch(2), *[_run(_COLLECTIVE)] * 3, _record(1, 2), _run(len(_WORKS)), _record(2, 2))
    dequantized = (_switch(1), _wait(1, 1), _wait(2, 1), _run(_KERNEL), _record(3, 1))
    schedule = Schedule(events=(*gather, *dequantized, _switch(0), _wait(3, 0)), works=works)
    prices = PriceList(machine=_MACHINE, ranks_per_node=2, efficiency=_PERFECT)
    step = forecast_step(schedule, prices, _EXACT, accumulation=1)
    assert step.seconds == pytest.approx(4.005)
    assert step.bound == "communication"


def test_a_collective_after_a_longer_pass_is_what_is_waited_for() -> None:
    """As the all-reduce of ddp, which waits for a backward pass that takes longer than itself."""
    reduced = (_switch(1), _wait(1, 1), _run(_COLLECTIVE), _record(2, 1))
    step = _replay(*[_run(_MATMUL)] * 3, _record(1, 0), *reduced, _switch(0), _wait(2, 0))
    assert step.seconds == pytest.approx(4)
    assert step.spent["communication"] == pytest.approx(1)
    assert step.spent["compute"] == pytest.approx(3)


def test_a_wait_for_another_step_s_record_costs_nothing() -> None:
    assert _replay(_wait(7, 0), _run(_KERNEL)).seconds == pytest.approx(1)


def test_the_host_works_while_the_card_does() -> None:
    assert _replay(_run(_MATMUL), _OPTIMIZER << BITS | codes.HOST).seconds == pytest.approx(2)


def test_the_card_waits_for_a_host_that_waited() -> None:
    step = _replay(_run(_MATMUL), codes.HOST_WAITS_ALL, _OPTIMIZER << BITS | codes.HOST, _run(_KERNEL))
    assert step.seconds == pytest.approx(4)
    assert step.spent["host"] == pytest.approx(2)


def test_many_small_operators_are_bound_by_launches() -> None:
    slow_host = replace(_PERFECT, launch_us=2e6, view_us=1e6)
    step = _replay(_run(_KERNEL), _run(_VIEW), _run(_KERNEL), efficiency=slow_host)
    assert step.seconds == pytest.approx(6)
    assert step.bound == "launch"


def test_further_micro_batches_last_as_long_as_the_first() -> None:
    events = (_run(_MATMUL), codes.HOST_WAITS_ALL, codes.MICRO_BATCH, _run(_MATMUL), _run(_KERNEL))
    step = _replay(*events, accumulation=5)
    assert step.seconds == pytest.approx(6)
    assert sum(step.spent.values()) == pytest.approx(6)


def test_a_long_accumulation_repeats_the_last_micro_batch_but_one() -> None:
    first, middle = (_run(_MATMUL), codes.MICRO_BATCH), (_run(_MATMUL), _run(_KERNEL), codes.MICRO_BATCH)
    step = _replay(*first, *middle, _run(_MATMUL), accumulation=10)
    assert step.seconds == pytest.approx(1 + 8 * 2 + 1)
    assert step.spent["memory"] == pytest.approx(8)


@pytest.mark.parametrize(("accumulation", "seconds"), [(3, 4), (2, 3), (1, 2)])
def test_a_step_has_no_more_micro_batches_than_asked(accumulation: int, seconds: float) -> None:
    """As where a micro batch that is a rank's whole share is simulated on the engine of a smaller one."""
    micro_batch = (_run(_MATMUL), codes.HOST_WAITS_ALL, codes.MICRO_BATCH)
    step = _replay(*micro_batch, *micro_batch, _run(_MATMUL), _run(_KERNEL), accumulation=accumulation)
    assert step.seconds == pytest.approx(seconds)
    assert (step.spent["compute"], step.spent["memory"]) == (pytest.approx(accumulation), pytest.approx(1))
    assert sum(step.spent.values()) == pytest.approx(seconds)


def test_the_optimizer_counts_once_in_what_a_step_spends() -> None:
    optimize = _OPTIMIZER << BITS | codes.HOST
    step = _replay(_run(_MATMUL), codes.MICRO_BATCH, _run(_MATMUL), optimize, accumulation=5)
    assert step.bound == "compute"
    assert step.spent["compute"] == pytest.approx(5)


def test_a_matmul_s_traffic_adds_to_its_compute() -> None:
    matmul = Work(kind="matmul", flops=1e12, bytes=10**9, dtype="bfloat16")
    seconds = {traffic: _price(matmul, matmul_traffic=traffic).seconds for traffic in (0, 2)}
    assert seconds == pytest.approx({0: 1, 2: 3}, rel=1e-3)


def test_a_matmul_of_little_work_moves_its_bytes_at_least() -> None:
    assert _price(Work(kind="matmul", bytes=10**9, dtype="bfloat16"), matmul_traffic=0).seconds == pytest.approx(1)


def test_a_slow_collective_delays_kernels_by_its_bytes() -> None:
    fast, slow = (
        _price(Work(kind="collective", bytes=2 * 10**9, ranks=ranks), contention=0.1, collective_traffic=0.5)
        for ranks in (2, 4)
    )
    assert slow.seconds == pytest.approx(3 * fast.seconds)
    assert fast.contention == pytest.approx(1)
    assert slow.contention == pytest.approx(0.1 + 1 / 3)


def test_a_collective_between_nodes_takes_the_network() -> None:
    prices = PriceList(machine=_MACHINE, ranks_per_node=2, efficiency=_PERFECT)
    within, between = (prices.price(Work(kind="collective", bytes=10**9, ranks=ranks)).seconds for ranks in (2, 4))
    assert within == pytest.approx(0.5)
    assert between == pytest.approx(1.5)


def test_ranks_of_a_node_share_host_memory() -> None:
    alone, shared = (
        PriceList(machine=_MACHINE, ranks_per_node=ranks, efficiency=_PERFECT).price(_WORKS[_OPTIMIZER]).seconds
        for ranks in (1, 8)
    )
    assert shared == pytest.approx(8 * alone)


def test_each_of_several_ranks_has_one_thread_by_default() -> None:
    seconds = {
        cores: PriceList(
            machine=replace(_MACHINE, cores=cores), ranks_per_node=2, efficiency=replace(_PERFECT, core_gb_per_s=0.1)
        )
        .price(_WORKS[_OPTIMIZER])
        .seconds
        for cores in (None, 4, 64)
    }
    assert seconds == pytest.approx({None: 10, 4: 5, 64: 2})


def test_the_host_s_part_of_a_step_has_a_wider_bound() -> None:
    prices = PriceList(machine=_MACHINE, ranks_per_node=1, efficiency=_PERFECT)
    events = (_run(_MATMUL), codes.HOST_WAITS_ALL, _OPTIMIZER << BITS | codes.HOST, _run(_MATMUL))
    constants = replace(_EXACT, high=1.5, host_high=4)
    step = forecast_step(Schedule(events=events, works=_WORKS), prices, constants, accumulation=1)
    assert step.high_seconds == pytest.approx(2 * 1.5 + 1 * 4)


def test_launches_have_a_bound_of_their_own() -> None:
    efficiency = replace(_PERFECT, launch_us=2e6)
    prices = PriceList(machine=_MACHINE, ranks_per_node=1, efficiency=efficiency)
    constants = replace(_EXACT, efficiency=efficiency, high=1.5, launch_high=3)
    step = forecast_step(Schedule(events=(_run(_MATMUL),), works=_WORKS), prices, constants, accumulation=1)
    assert step.high_seconds == pytest.approx(step.spent["launch"] * 3 + (step.seconds - step.spent["launch"]) * 1.5)


def test_units_of_fp32_hide_their_loads_and_are_not_throttled() -> None:
    assert _MACHINE.rates is not None
    machine = replace(_MACHINE, rates=replace(_MACHINE.rates, matmul_share=0.5, tflops=Tflops(fp32=1, bf16=4)))
    prices = PriceList(machine=machine, ranks_per_node=1, efficiency=replace(_PERFECT, fp32_matmul=0.8))
    seconds = {
        dtype: prices.price(Work(kind="matmul", flops=1e12, bytes=10**8, dtype=dtype)).seconds
        for dtype in ("float32", "bfloat16")
    }
    assert seconds == pytest.approx({"float32": 1.25, "bfloat16": 0.5 + 0.1})


def test_a_sum_over_rows_is_slower_than_a_kernel() -> None:
    kernel, reduction = (Work(kind=kind, bytes=10**9) for kind in ("kernel", "reduction"))
    assert _price(kernel, memory=0.8).seconds == pytest.approx(1.25)
    assert _price(reduction, memory=0.8, reduction=0.4).seconds == pytest.approx(2.5)


@pytest.mark.parametrize(("capability", "seconds"), [("8.0", 2), ("9.0", 5), (None, 5)])
def test_tensor_cores_are_slower_with_unaligned_rows(capability: str | None, seconds: float) -> None:
    assert _MACHINE.rates is not None
    tflops = Tflops(fp32=0.1, bf16=1)
    machine = replace(_MACHINE, rates=replace(_MACHINE.rates, tflops=tflops, compute_capability=capability))
    efficiency = replace(_PERFECT, unaligned=0.5, unaligned_from_hopper=0.2)
    prices = PriceList(machine=machine, ranks_per_node=1, efficiency=efficiency)
    work = Work(kind="matmul", flops=1e12, dtype="bfloat16", aligned=False)
    assert prices.price(work).seconds == pytest.approx(seconds)
    assert prices.price(replace(work, dtype="float32")).seconds == pytest.approx(10)  # no tensor cores


def test_what_unaligned_rows_cost_is_counted_for_every_micro_batch() -> None:
    efficiency = replace(_PERFECT, unaligned_from_hopper=0.5)
    assert _MACHINE.rates is not None
    machine = replace(_MACHINE, rates=replace(_MACHINE.rates, tflops=Tflops(fp32=0.1, bf16=1)))
    works = (_WORKS[_MATMUL], replace(_WORKS[_MATMUL], aligned=False))
    events = (_run(0), _run(1), codes.MICRO_BATCH, _run(0), _run(1))
    prices = PriceList(machine=machine, ranks_per_node=1, efficiency=efficiency)
    step = forecast_step(Schedule(events=events, works=works), prices, _EXACT, accumulation=4)
    assert (step.seconds, step.unaligned_seconds) == (pytest.approx(4 * 3), pytest.approx(4 * 1))


def test_memory_that_is_given_back_in_each_micro_batch_takes_time() -> None:
    schedule = Schedule(events=(_run(0), codes.MICRO_BATCH, _run(0)), works=_WORKS)
    prices = PriceList(machine=_MACHINE, ranks_per_node=1, efficiency=_PERFECT)
    calm, flushed = (
        forecast_step(schedule, prices, _EXACT, accumulation=4, returned=returned) for returned in (0, 1_000_000)
    )
    # The schedule has two of the four micro batches.
    assert flushed.seconds - calm.seconds == pytest.approx(2 * _PERFECT.return_us)
    assert flushed.low_seconds == pytest.approx(calm.low_seconds)
    assert sum(flushed.spent.values()) == pytest.approx(flushed.seconds)


@pytest.mark.parametrize(
    ("capability", "has_cudnn", "gain"), [("9.0", True, 1.5), ("9.0", False, 1), ("8.0", True, 1), ("12.0", True, 1)]
)
def test_cudnn_attention_is_faster_where_torch_takes_it(capability: str, has_cudnn: bool, gain: float) -> None:
    assert _MACHINE.rates is not None
    rates = replace(_MACHINE.rates, compute_capability=capability, attention_share=0.5)
    efficiency = replace(_PERFECT, cudnn_attention=2, cudnn_half_intensity=1000)
    prices = PriceList(
        machine=replace(_MACHINE, rates=rates), ranks_per_node=1, efficiency=efficiency, has_cudnn_attention=has_cudnn
    )
    work = Work(
        kind="attention", name="_scaled_dot_product_flash", flops=3e12, bytes=10**9, dtype="bfloat16"
    )  # 3000 FLOPs a byte
    assert prices.price(work).seconds == pytest.approx(6 / gain)
    assert prices.price(replace(work, name="efficient")).seconds == pytest.approx(6)


@pytest.mark.parametrize(("capability", "seconds"), [("7.0", 1), ("8.0", 2), (None, 2)])
def test_the_memory_efficient_kernel_is_slower_than_flash(capability: str | None, seconds: float) -> None:
    assert _MACHINE.rates is not None
    machine = replace(_MACHINE, rates=replace(_MACHINE.rates, compute_capability=capability))
    prices = PriceList(machine=machine, ranks_per_node=1, efficiency=replace(_PERFECT, efficient_attention=0.5))
    name = "_scaled_dot_product_efficient_attention"
    assert prices.price(Work(kind="attention", name=name, flops=1e12, dtype="bfloat16")).seconds == pytest.approx(
        seconds
    )


def test_attention_is_faster_in_long_samples() -> None:
    long, short = (
        Work(kind="attention", name="flash_attn::_flash_attn_forward", flops=flops, bytes=10**9, dtype="bfloat16")
        for flops in (900e9, 100e9)
    )
    seconds = [_price(work, attention_half_intensity=100).seconds for work in (long, short)]
    assert seconds == pytest.approx(
        [1.0, 1.0]
    )  # 900 FLOPs a byte have 0.9 of the rate; with 100, its bytes take as long
    assert _price(replace(short, bytes=10**8), attention_half_intensity=1000).seconds == pytest.approx(0.2)


@pytest.mark.parametrize(("unsure", "seconds"), [(1, 1.0), (0, 0.0)])
def test_attention_of_unknown_flops_counts_its_bytes(unsure: float, seconds: float) -> None:
    unknown = Work(kind="attention", bytes=10**9, dtype="bfloat16", sure=False)
    price = _price(unknown, attention_half_intensity=100, unsure=unsure)
    assert (price.seconds, price.sure) == (pytest.approx(seconds, abs=1e-6), False)


def test_a_new_page_of_the_host_costs_more_than_a_used_one() -> None:
    used, new = (
        _price(Work(kind="host", bytes=10**9, fresh=fresh), first_touch_gb_per_s=0.05).seconds for fresh in (0, 10**8)
    )
    assert used == pytest.approx(2)
    assert new == pytest.approx(0.9 * 2 + 0.1 * 20)


def test_truth_values_on_the_host_take_time_of_their_own() -> None:
    work = Work(kind="host", bytes=10**9, compared=10**9)
    seconds = {ns: _price(work, compare_ns=ns).seconds for ns in (1, 5)}
    assert seconds == pytest.approx({1: 2, 5: 5})


def test_a_single_rank_has_the_memory_of_one_socket() -> None:
    seconds = {
        ranks: PriceList(machine=replace(_MACHINE, sockets=2), ranks_per_node=ranks, efficiency=_PERFECT)
        .price(_WORKS[_OPTIMIZER])
        .seconds
        for ranks in (1, 2, 8)
    }
    assert seconds == pytest.approx({1: 2, 2: 2, 8: 8})


def test_cards_behind_one_switch_share_their_link_to_the_host() -> None:
    assert _MACHINE.links is not None
    pairs = replace(_MACHINE, links=replace(_MACHINE.links, to_host_shared_by=2))
    seconds = {
        (kind, ranks): PriceList(machine=pairs, ranks_per_node=ranks, efficiency=_PERFECT)
        .price(Work(kind=kind, bytes=10**9))
        .seconds
        for kind in ("copy", "pageable_copy")
        for ranks in (1, 8)
    }
    assert seconds == pytest.approx({("copy", 1): 1, ("copy", 8): 2, ("pageable_copy", 1): 2, ("pageable_copy", 8): 2})


def test_python_costs_the_host_and_not_the_card() -> None:
    price = _price(Work(kind="python", opcodes=4), opcode_ns=5e8)
    assert (price.launch_s, price.seconds) == (2, 0)


def test_a_machine_without_peaks_has_no_prices() -> None:
    prices = PriceList(machine=replace(_MACHINE, rates=None), ranks_per_node=2, efficiency=_PERFECT)
    with pytest.raises(Unpriced):
        prices.price(_WORKS[_KERNEL])


def test_the_shipped_constants_are_read() -> None:
    constants = read_constants()
    assert set(constants.sources) == set(Efficiency.__dataclass_fields__)


def test_a_type_without_a_rate_has_a_guess_and_no_lower_bound() -> None:
    matmul = Work(kind="matmul", flops=1e15, bytes=1, dtype="float8_e4m3fn")
    guess = _price(matmul)
    assert guess.seconds == pytest.approx(1000)  # at the card's 16-bit peak
    assert not guess.sure
    assert PriceList.at_peak(_MACHINE, 1).price(matmul).seconds < 1e-6
    assert _MACHINE.rates is not None
    known = replace(_MACHINE, rates=replace(_MACHINE.rates, tflops=Tflops(fp32=1, bf16=1, fp8=2)))
    priced = PriceList(machine=known, ranks_per_node=1, efficiency=_PERFECT).price(matmul)
    assert (priced.seconds, priced.sure) == (pytest.approx(500), True)


def test_sixteen_bits_without_units_take_those_of_fp32() -> None:
    assert _price(Work(kind="matmul", flops=1e12, dtype="float16")).sure


def test_an_unknown_kernel_widens_the_interval_both_ways() -> None:
    prices = PriceList(machine=_MACHINE, ranks_per_node=1, efficiency=_PERFECT)
    works = (Work(kind="matmul", flops=1e12, dtype="bfloat16"), Work(kind="kernel", bytes=10**9, sure=False))
    schedule = Schedule(events=(_run(0), _run(1), codes.MICRO_BATCH, _run(0), _run(1)), works=works)
    step = forecast_step(schedule, prices, replace(_EXACT, unsure_high=4), accumulation=3)
    assert step.seconds == pytest.approx(6)
    assert step.low_seconds == pytest.approx(3)
    assert step.high_seconds == pytest.approx(6 + 4 * 3)


def test_all_to_all_between_nodes_shares_the_network() -> None:
    prices = PriceList(machine=_MACHINE, ranks_per_node=2, efficiency=_PERFECT)
    all_to_all, ring = (
        prices.price(Work(kind="collective", bytes=10**9, ranks=4, pairwise=pairwise)).seconds
        for pairwise in (True, False)
    )
    assert ring == pytest.approx(0.75 / 0.5)
    assert all_to_all == pytest.approx(2 * 0.5 / 0.5)  # each of two ranks has half of its bytes for the other node


def test_all_to_all_of_strided_groups_shares_it_alike() -> None:
    prices = PriceList(machine=_MACHINE, ranks_per_node=2, efficiency=_PERFECT)
    work = Work(kind="collective", bytes=10**9, ranks=2, stride=2, pairwise=True)
    assert prices.price(work).seconds == pytest.approx(2 * 0.5 / 0.5)


def test_messages_of_a_few_megabytes_lack_bandwidth() -> None:
    """all_reduce_perf of 8 GPUs over NVLink, µs by MiB: github.com/kvcache-ai/Mooncake/pull/3484."""
    measured = {1 / 32: 18.7, 1: 27.8, 2: 40.7, 4: 53.2, 8: 81.2, 16: 121.3, 32: 195.4}
    machine = read_catalogue()["h100-80gb"]
    prices = PriceList(machine=machine, ranks_per_node=8, efficiency=read_constants().efficiency)
    for size, us in measured.items():
        work = Work(kind="collective", name="allreduce", bytes=int(2 * size * 2**20), ranks=8)
        assert prices.price(work).seconds == pytest.approx(us * 1e-6, rel=0.25), size


def test_measured_values_take_the_place_of_the_shipped_ones() -> None:
    machine = read_catalogue()["h100-80gb"]
    measured = replace(machine, measured=Measured(memory=0.4, launch_us=20))
    assert PriceList.usual(machine, 8).efficiency == read_constants().efficiency
    assert PriceList.usual(measured, 8).efficiency == replace(read_constants().efficiency, memory=0.4, launch_us=20)


def test_every_measured_value_has_a_shipped_one() -> None:
    every = Measured(**dict.fromkeys(Measured.__dataclass_fields__, 0.5))
    assert set(every.known) <= set(Efficiency.__dataclass_fields__)
