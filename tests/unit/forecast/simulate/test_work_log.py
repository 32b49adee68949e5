"""The log of streams, events, copies and collectives that a schedule is made of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autods.forecast.predict import step_time as codes
from autods.forecast.predict.prices import Work
from autods.forecast.predict.step_time import BITS, CODES, STREAM_BITS
from autods.forecast.simulate.fake_gpu import Event, Stream
from autods.forecast.simulate.work_log import WorkLog

_aten = torch.ops.aten


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> WorkLog:
    log = WorkLog()
    monkeypatch.setattr(Stream, "log", log)
    monkeypatch.setattr(Event, "log", log)
    log.begin("forward", 0)
    del log.events[:]
    return log


@pytest.fixture
def fake() -> Iterator[FakeTensorMode]:
    with FakeTensorMode() as mode:
        yield mode


def _codes(log: WorkLog) -> list[int]:
    return [event & CODES for event in log.events]


def _issue(log: WorkLog, func: object, *args: object) -> Work:
    """Run an operator on the CPU and return its work, as if its tensors were on the device."""
    log.issue(func, args, {}, func(*args))  # type: ignore[operator]
    return log.schedule().works[log.events[-1] >> BITS]


def test_a_stream_waits_for_another_s_record(log: WorkLog) -> None:
    first, second = Stream(), Stream()
    second.wait_stream(first)
    assert _codes(log) == [codes.RECORD, codes.WAIT]
    recorded, waited = (event >> BITS for event in log.events)
    assert recorded >> STREAM_BITS == waited >> STREAM_BITS
    assert waited & codes.STREAMS == second.stream_id


def test_a_stream_is_current_inside_its_block(log: WorkLog) -> None:
    stream = Stream()
    with stream:
        assert log.current == stream.stream_id
    assert log.current == 0


def test_an_event_that_was_never_recorded_holds_nobody(log: WorkLog) -> None:
    event = Event()
    event.wait()
    event.synchronize()
    assert not log.events
    event.record()
    event.synchronize()
    assert _codes(log) == [codes.RECORD, codes.HOST_WAITS_RECORD]


def test_a_new_step_forgets_the_former(log: WorkLog) -> None:
    Stream().synchronize()
    log.begin("backward", 0)
    assert len(log.events) == 1
    log.begin("forward", 0)
    assert _codes(log)[-1] == codes.MICRO_BATCH
    log.begin("forward", 1)
    assert _codes(log) == [codes.SWITCH]


def test_operators_of_the_host_are_the_host_s_work(log: WorkLog, fake: FakeTensorMode) -> None:
    work = _issue(log, _aten.add.Tensor, torch.empty(100), torch.empty(100))
    assert _codes(log) == [codes.HOST]
    assert work == Work(kind="host", name="add", bytes=3 * 400)


def test_a_large_result_on_the_host_is_in_new_memory(log: WorkLog, fake: FakeTensorMode) -> None:
    large = torch.empty(10**7)
    assert _issue(log, _aten.add.Tensor, large, large).fresh == 4 * 10**7
    assert _issue(log, _aten.add_.Tensor, large, large).fresh == 0
    assert _issue(log, _aten.view.default, large, [10**7]).fresh == 0


def test_a_search_for_infinities_compares_new_values(log: WorkLog, fake: FakeTensorMode) -> None:
    work = _issue(log, _aten.isinf.default, torch.empty(4 * 10**7, dtype=torch.float16))
    assert (work.compared, work.fresh) == (4 * 10**7, 3 * 4 * 10**7)


def test_an_expanded_tensor_is_read_once(log: WorkLog, fake: FakeTensorMode) -> None:
    work = _issue(log, _aten.add.Tensor, torch.empty(100), torch.empty(1).expand(100))
    assert work.bytes == 2 * 400 + 4


def test_an_overwritten_tensor_is_not_read(log: WorkLog, fake: FakeTensorMode) -> None:
    assert _issue(log, _aten.copy_.default, torch.empty(100), torch.empty(100)).bytes == 2 * 400
    assert _issue(log, _aten.zero_.default, torch.empty(100)).bytes == 400
    assert _issue(log, _aten.add_.Tensor, torch.empty(100), torch.empty(100)).bytes == 3 * 400


def test_an_embedding_reads_its_rows_only(log: WorkLog, fake: FakeTensorMode) -> None:
    table, rows = torch.empty(10**6, 4), torch.empty(3, dtype=torch.long)
    assert _issue(log, _aten.embedding.default, table, rows).bytes == 2 * 3 * 4 * 4


def _copy(
    log: WorkLog, target: torch.Tensor, source: torch.Tensor, *, asynchronous: bool = True
) -> list[tuple[str, int]]:
    """The kinds and bytes of the work that a copy between page-locked memory and the device makes."""
    log.is_pinned = lambda tensor: True
    log.issue(_aten.copy_.default, (target, source, asynchronous), {}, target)
    entered = [event >> BITS for event in log.events if event & CODES in (codes.RUN, codes.HOST)]
    return [(work.kind, work.bytes) for work in (log.schedule().works[number] for number in entered)]


def test_a_converting_copy_from_the_host_is_pageable(log: WorkLog, fake: FakeTensorMode) -> None:
    target = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    assert _copy(log, target, torch.zeros(8), asynchronous=False) == [("host", 48), ("pageable_copy", 16)]
    assert codes.HOST_WAITS_STREAM in _codes(log)


def test_an_asynchronous_copy_from_the_host_converts_last(log: WorkLog, fake: FakeTensorMode) -> None:
    target = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    assert _copy(log, target, torch.zeros(8)) == [("copy", 32), ("kernel", 48)]
    assert codes.HOST_WAITS_STREAM not in _codes(log)


def test_a_copy_to_the_host_that_is_waited_for_converts_there(log: WorkLog, fake: FakeTensorMode) -> None:
    source = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    assert _copy(log, torch.zeros(8), source, asynchronous=False) == [("pageable_copy", 16), ("host", 48)]
    assert _codes(log)[-2:] == [codes.HOST_WAITS_STREAM, codes.HOST]


def test_a_converting_copy_to_the_host_converts_first(log: WorkLog, fake: FakeTensorMode) -> None:
    source = torch.zeros(8, dtype=torch.bfloat16, device="cuda")
    assert _copy(log, torch.zeros(8), source) == [("kernel", 48), ("copy", 32)]
    assert codes.HOST_WAITS_STREAM not in _codes(log)


def _describe(log: WorkLog, func: object, *args: object) -> Work:
    """The work of an operator on the device."""
    log.issue(func, args, {}, func(*args))  # type: ignore[operator]
    (number,) = (event >> BITS for event in log.events if event & CODES == codes.RUN)
    del log.events[:]
    return log.schedule().works[number]


@pytest.mark.parametrize(("outputs", "is_aligned"), [(50257, False), (50304, True)])
def test_a_vocabulary_decides_whether_rows_are_aligned(
    log: WorkLog, fake: FakeTensorMode, outputs: int, is_aligned: bool
) -> None:
    hidden, weight = (torch.empty(size, 64, dtype=torch.bfloat16, device="cuda") for size in (8, outputs))
    assert _describe(log, _aten.mm.default, hidden, weight.t()).aligned is is_aligned
    logits = torch.empty(8, outputs, dtype=torch.bfloat16, device="cuda")
    assert _describe(log, _aten.mm.default, logits, weight).aligned is is_aligned


def test_a_single_row_and_a_convolution_count_as_aligned(log: WorkLog, fake: FakeTensorMode) -> None:
    row = torch.empty_strided((1, 64), (50257, 1), dtype=torch.bfloat16, device="cuda")
    weight = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    assert _describe(log, _aten.mm.default, row, weight).aligned
    image, kernels = (torch.empty(size, device="cuda") for size in ((2, 3, 15, 15), (8, 3, 7, 7)))
    convolved = (image, kernels, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1)
    assert _describe(log, _aten.convolution.default, *convolved).aligned


@pytest.mark.parametrize(("precision", "product"), [("none", "float32"), ("tf32", "tf32")])
def test_fp32_takes_tf32_where_torchs_newer_switch_says_so(
    log: WorkLog, fake: FakeTensorMode, monkeypatch: pytest.MonkeyPatch, precision: str, product: str
) -> None:
    monkeypatch.setattr(torch.backends, "fp32_precision", precision)
    square = torch.empty(64, 64, device="cuda")
    assert _describe(log, _aten.mm.default, square, square).dtype == product
    image, kernels = (torch.empty(size, device="cuda") for size in ((2, 3, 15, 15), (8, 3, 7, 7)))
    convolved = (image, kernels, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1)
    assert _describe(log, _aten.convolution.default, *convolved).dtype == "tf32"  # by default, too


def test_a_norm_is_a_reduction_and_a_gelu_is_not(log: WorkLog, fake: FakeTensorMode) -> None:
    hidden = torch.empty(8, 64, device="cuda")
    assert _describe(log, _aten.native_layer_norm.default, hidden, [64], None, None, 1e-5).kind == "reduction"
    assert _describe(log, _aten.gelu.default, hidden).kind == "kernel"


@pytest.mark.parametrize("name", ["mm", "addmm", "bmm", "baddbmm"])
def test_a_matmul_with_a_result_of_its_own_dtype_has_flops(log: WorkLog, fake: FakeTensorMode, name: str) -> None:
    batch = (2,) if "b" in name else ()
    shapes = ((3, 4), (4, 5)) if name in ("mm", "bmm") else ((3, 5), (3, 4), (4, 5))
    operands = [torch.empty(*batch, *shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
    func, out = getattr(_aten, name).dtype, torch.empty(*batch, 3, 5, device="cuda")
    log.issue(func, (*operands, torch.float32), {}, out)
    (number,) = (event >> BITS for event in log.events if event & CODES == codes.RUN)
    assert log.schedule().works[number].flops == 2 * 3 * 4 * 5 * (2 if batch else 1)


def test_attention_with_grouped_heads_has_the_flops_of_all_queries(log: WorkLog, fake: FakeTensorMode) -> None:
    query = torch.empty(2, 8, 16, 32, dtype=torch.bfloat16, device="cuda")
    grouped = torch.empty(2, 2, 16, 32, dtype=torch.bfloat16, device="cuda")
    few, all_heads = (
        _describe(log, _aten._scaled_dot_product_flash_attention.default, query, key, key, 0.0, True)
        for key in (grouped, query)
    )
    assert few.flops == all_heads.flops == 4 * 2 * 8 * 16 * 16 * 32 / 2


@pytest.mark.parametrize(
    ("first", "second", "offsets", "flops"),
    [
        ((96, 64), (4, 64, 32), 4, 2 * 96 * 64 * 32),  # rows of tokens go to their experts
        ((64, 96), (96, 32), 4, 2 * 64 * 96 * 32),  # the gradient of the weights: tokens are summed up
        ((4, 16, 64), (64, 96), 4, 2 * 16 * 64 * 96),
        ((4, 16, 64), (4, 64, 32), None, 4 * 2 * 16 * 64 * 32),
    ],
)
def test_a_grouped_matmul_shares_its_rows_among_experts(
    log: WorkLog, fake: FakeTensorMode, first: tuple[int, ...], second: tuple[int, ...], offsets: int | None, flops: int
) -> None:
    matrix, weights = (torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in (first, second))
    ends = None if offsets is None else torch.empty(offsets, dtype=torch.int32, device="cuda")
    work = _describe(log, _aten._grouped_mm.default, matrix, weights, ends)
    out = _aten._grouped_mm.default(matrix, weights, ends)
    assert (work.kind, work.flops, work.dtype) == ("matmul", flops, "bfloat16")
    assert work.bytes == 2 * (matrix.numel() + weights.numel() + out.numel()) + 4 * (offsets or 0)
