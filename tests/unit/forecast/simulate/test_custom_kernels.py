"""Operators and kernels of other libraries on the simulated GPU: their work, their results, what is said of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autods.forecast.predict import step_time as codes
from autods.forecast.predict.prices import Work
from autods.forecast.predict.step_time import BITS, CODES
from autods.forecast.simulate import custom_kernels
from autods.forecast.simulate.dispatch import Recorder
from autods.forecast.simulate.ledger import DEVICE, Ledger

_LENGTH, _HEADS, _HEAD = 128, 8, 64


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger, mode = Ledger(one_memory=False), FakeTensorMode(allow_non_fake_inputs=True)
    ledger.begin("forward")
    ledger.work.begin("forward", 0)
    with mode, Recorder(ledger, mode):
        yield ledger


def _works(ledger: Ledger) -> list[Work]:
    works = ledger.work.schedule().works
    return [works[event >> BITS] for event in ledger.work.events if event & CODES == codes.RUN]


def _declare(name: str, schema: str) -> Any:
    """Declare an operator, as a library does, with results like its first argument."""
    namespace = name.partition("::")[0]
    try:
        torch.library.define(name, schema)
        count = schema.partition("->")[2].count("Tensor")

        def make(first: Any, *args: Any, **kwargs: Any) -> Any:
            made = tuple(torch.empty_like(first) for _ in range(count))
            return made if count > 1 else made[0]

        torch.library.register_fake(name, make)
    except RuntimeError:  # declared by another test
        pass
    return getattr(getattr(torch.ops, namespace), name.partition("::")[2]).default


def test_flash_attention_s_package_takes_time(ledger: Ledger) -> None:
    schema = (
        "(Tensor q, Tensor k, Tensor v, float p, float scale, bool causal, int window_size_left) -> (Tensor, Tensor)"
    )
    attend = _declare("flash_attn::_flash_attn_forward", schema)
    query = torch.empty(2, _LENGTH, _HEADS, _HEAD, dtype=torch.bfloat16, device="cuda")
    attend(query, query, query, 0.0, 1.0, True, -1)
    work = _works(ledger)[-1]
    assert (work.kind, work.dtype, work.sure) == ("attention", "bfloat16", True)
    assert work.flops == 4 * 2 * _HEADS * _LENGTH * _LENGTH * _HEAD / 2
    assert not ledger.assumed


def test_an_unknown_operator_counts_by_its_bytes_and_is_reported(ledger: Ledger) -> None:
    mix = _declare("some_library::mix", "(Tensor x, Tensor y) -> (Tensor, Tensor)")
    x = torch.empty(1000, device="cuda")
    before = ledger.current[DEVICE]
    held = mix(x, torch.empty(500, device="cuda"))
    work = _works(ledger)[-1]
    assert (work.kind, work.bytes, work.sure) == ("kernel", 4 * (1000 + 500 + 2 * 1000), False)
    assert ledger.current[DEVICE] - before == 2 * 4000
    assert len(held) == 2
    assert any("some_library.mix" in sentence and "wider" in sentence for sentence in ledger.assumed)


def test_an_operator_without_tensors_is_not_reported(ledger: Ledger) -> None:
    torch.library.define("some_library::can_it", "(int x) -> int")
    torch.library.impl("some_library::can_it", "CompositeExplicitAutograd", lambda x: x)
    assert torch.ops.some_library.can_it(3) == 3
    assert not ledger.assumed


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> Any:
    """Triton as far as launches go; without a GPU its own would fail when it asks for the driver."""

    class JITFunction:
        def __init__(self, fn: Any, arg_names: list[str]) -> None:
            self.fn, self.arg_names = fn, arg_names

        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            raise RuntimeError("0 active drivers")

    class Autotuner:
        def __init__(self, fn: Any, configs: list[Any]) -> None:
            self.fn, self.configs = fn, configs

        def run(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("0 active drivers")

    for name, held in {"jit": {"JITFunction": JITFunction}, "autotuner": {"Autotuner": Autotuner}}.items():
        module = ModuleType(f"triton.runtime.{name}")
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    runtime = ModuleType("triton.runtime")
    vars(runtime).update(jit=sys.modules["triton.runtime.jit"], autotuner=sys.modules["triton.runtime.autotuner"])
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    vars(sys.modules["triton"]).update(runtime=runtime)
    custom_kernels.install(ledger)
    return SimpleNamespace(JITFunction=JITFunction, Autotuner=Autotuner)


def test_a_launch_of_triton_is_recorded_by_its_bytes(ledger: Ledger, triton: Any) -> None:
    def _swiglu_forward_kernel() -> None: ...

    tensor = torch.empty(1000, device="cuda")
    kernel = triton.JITFunction(_swiglu_forward_kernel, ["a", "b", "c", "stride"])
    kernel.run(tensor, tensor, torch.empty(1000, device="cuda"), 1, grid=(8,), warmup=False, BLOCK=128)
    assert _works(ledger)[-1] == Work(kind="kernel", name="_swiglu_forward_kernel", bytes=2 * 4000, dtype="float32")
    assert not ledger.assumed


def test_an_unknown_launch_of_triton_is_reported(ledger: Ledger, triton: Any) -> None:
    def mine() -> None: ...

    kernel = triton.JITFunction(mine, ["x"])
    tuned = triton.Autotuner(kernel, [SimpleNamespace(all_kwargs=lambda: {"BLOCK": 64})])
    tuned.run(torch.empty(1000, device="cuda"), grid=(8,), warmup=False)
    assert not _works(ledger)[-1].sure
    assert any("mine" in sentence for sentence in ledger.assumed)


def test_mamba_s_scan_makes_its_states(monkeypatch: pytest.MonkeyPatch, ledger: Ledger) -> None:
    scan = ModuleType("selective_scan_cuda")
    vars(scan).update(fwd=None, bwd=None)
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", scan)
    custom_kernels.install(ledger)
    u = torch.empty(2, 64, 3000, dtype=torch.bfloat16, device="cuda")
    A, B = torch.empty(64, 16, device="cuda"), torch.empty(2, 1, 16, 3000, dtype=torch.bfloat16, device="cuda")
    out, states, gated = scan.fwd(u, u, A, B, B, None, u, None, True)
    assert (out.shape, states.shape, gated.shape) == (u.shape, (2, 64, 2, 32), u.shape)
    assert _works(ledger)[-1].flops == 9 * u.numel() * 16
    gradients = scan.bwd(u, u, A, B, B, None, u, None, out, states, out, None, True, True)
    assert [None if made is None else made.shape for made in gradients] == [
        u.shape, u.shape, A.shape, B.shape, B.shape, None, None, u.shape, u.shape,
    ]  # fmt: skip


def test_a_kernel_of_parts_counts_each_of_them(ledger: Ledger) -> None:
    """A matmul of 4-bit weights makes them whole first, as bitsandbytes does on cards."""

    def multiply(A: Any, B: Any, shapeB: Any, absmax: Any, blocksize: int, quant_type: str) -> Any:
        return torch.nn.functional.linear(A, torch.zeros(shapeB, dtype=A.dtype, device=A.device))

    rows, inner, columns = 48, 256, 512
    name = "bitsandbytes::gemm_4bit"
    multiplied = _declare(
        name, "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type) -> Tensor"
    )
    if "bitsandbytes" not in sys.modules:
        torch.library.register_kernel(name, None, multiply)
    inputs = torch.empty(2, rows // 2, inner, dtype=torch.bfloat16, device="cuda")
    packed = torch.empty(columns * inner // 2, 1, dtype=torch.uint8, device="cuda")
    scales = torch.empty(columns * inner // 64, device="cuda")
    held = ledger.peaks()["forward"]["device"]
    result = multiplied(inputs, packed, [columns, inner], scales, 64, "nf4")
    assert result.shape == (2, rows // 2, columns)
    assert ledger.peaks()["forward"]["device"] - held >= 2 * columns * inner + 2 * rows * columns
    assert [work.flops for work in _works(ledger) if work.kind == "matmul"] == [2 * rows * inner * columns]


def test_samples_that_are_cut_at_random_have_their_length(ledger: Ledger) -> None:
    text = torch.zeros(1000, dtype=torch.long)
    begins = torch.randint(len(text) - 16, (4,))
    assert torch.stack([text[begin : begin + 16] for begin in begins]).shape == (4, 16)
    begin = torch.randint(0, len(text) - 16, (1,))
    assert text[begin : begin + 16].shape == (16,)
    assert not ledger.assumed
