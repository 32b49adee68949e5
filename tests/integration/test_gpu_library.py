"""The simulated GPU's C++ library answers torch, and is refused after torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autods.forecast.simulate import gpu_library


@pytest.mark.timeout(100)  # it imports torch
def test_autograd_runs_on_the_simulated_gpu() -> None:
    if gpu_library.compiler() is None:
        pytest.skip("no C++ compiler")
    code = (
        "from autods.forecast.simulate import gpu_library\n"
        "library = gpu_library.load()\n"
        "import torch\n"
        "library.autods_register_guard()\n"
        "from torch._subclasses.fake_tensor import FakeTensorMode\n"
        "with FakeTensorMode():\n"
        "    weight = torch.empty(4, device='cuda', requires_grad=True)\n"
        "    (weight * 2).sum().backward()\n"
        "assert weight.grad.device.type == 'cuda'\n"
        "import os; os._exit(0)\n"  # autograd's thread for the device has no end
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_ASK = """
from autods.forecast.simulate import gpu_library
library = gpu_library.load()
import torch
library.autods_register_guard()
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

asked = []

class Count(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            asked.append(func)
        return func(*args, **(kwargs or {}))

def train():
    asked.clear()
    with FakeTensorMode(), Count():
        weight = torch.empty(4, 4, device="cuda", requires_grad=True)
        moved = torch.empty(4, 4).to("cuda")
        (weight @ moved[1:].t()).sum().backward()
        back = torch.empty(4, device="cuda").cpu()
        devices = [tensor.device.type for tensor in (weight.grad, moved, moved + 1, back)]
        return len(asked), devices, moved.to("cuda") is moved

asked_before, *before = train()
assert library.autods_answer_for_devices()
assert library.autods_answer_for_devices()  # a second call changes nothing
asked_after, *after = train()
assert before == after == [["cuda", "cuda", "cuda", "cpu"], True], (before, after)
assert asked_before > 10 and asked_after == 0, (asked_before, asked_after)
import os; os._exit(0)
"""


@pytest.mark.timeout(100)  # it imports torch
def test_devices_of_fake_tensors_are_answered_without_python() -> None:
    if gpu_library.compiler() is None:
        pytest.skip("no C++ compiler")
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(100)  # it imports torch
def test_the_library_is_refused_after_torch() -> None:
    code = "import torch; from autods.forecast.simulate import gpu_library; gpu_library.load()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "must be loaded before torch" in done.stderr


_ASK_BEFORE = """
from autods.forecast.simulate import gpu_library
library = gpu_library.load()
import torch
library.autods_register_guard()
library.autods_answer_for_devices()
from transformers.utils import is_torch_cuda_available
before = is_torch_cuda_available()  # as transformers does at its import where flash-attn is installed
from autods.devices import CUDA
from autods.forecast.simulate.engine import SimulationContext
SimulationContext(CUDA)
print(before, is_torch_cuda_available())
import os, sys; sys.stdout.flush(); os._exit(0)
"""


@pytest.mark.timeout(100)
def test_transformers_forgets_that_there_was_no_gpu() -> None:
    if gpu_library.compiler() is None:
        pytest.skip("no C++ compiler")
    done = subprocess.run([sys.executable, "-c", _ASK_BEFORE], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
