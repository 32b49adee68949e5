"""Where simulated cards come into the product's processes; `preload/sitecustomize.py` calls these after an import.

Real are the processes, NVML's bindings, torch.cuda's Python half, DeepSpeed with its CUDA accelerator, the rendezvous,
and that ranks wait for each other. Simulated are the driver (`driver.c`), torch.cuda's C half (`runtime.py`), and the
tensors, which have sizes and no values (`tensors.py`). Every loss is 1.0, and no time means anything: what numbers
decide is not checked.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from tests.support.cards.machine import VARIABLE, Machine

_for_ever = contextlib.ExitStack()


def claim_cuda_build(cuda: Any) -> None:
    """`autods.devices.cuda`: let it take a CPU build of torch for one with CUDA."""
    from autods.devices.torch_build import TorchBuild

    build = cuda.read_torch_build()
    if build is not None and build.cuda is None:
        cuda.read_torch_build = lambda folder=None: TorchBuild(version=build.version, cuda=(12, 8))


def preload_on_a_card(preload: Any) -> None:
    """`autods.rank.preload`: put the runtime under torch before it is imported, and simulate tensors after that."""
    if not {"autods.runner.zygote", "autods.rank.worker"} & set(sys.orig_argv):
        return  # a forecast has a simulated GPU of its own
    original = preload.preload

    def preload_with_card() -> None:
        from autods.forecast.simulate import gpu_library

        library = gpu_library.load()
        import torch  # noqa: F401

        library.autods_register_guard()
        from tests.support.cards.runtime import Runtime

        runtime = Runtime(Machine(Path(os.environ[VARIABLE])), library)
        runtime.install()
        original()
        from tests.support.cards import tensors

        tensors.install(runtime)
        if "autods.rank.worker" in sys.orig_argv:  # a rank that was not forked
            _for_ever.enter_context(tensors.simulated())

    preload.preload = preload_with_card


def run_ranks_on_a_card(worker: Any) -> None:
    """`autods.rank.worker`: the tensors of its ranks are simulated."""
    original = worker.run_rank

    def run_rank(*args: Any) -> int:
        from tests.support.cards import tensors

        with tensors.simulated():
            code = original(*args)
        assert isinstance(code, int)
        return code

    worker.run_rank = run_rank


def build_for_ranks_on_a_card(shared_build: Any) -> None:
    """`autods.rank.shared_build`: the tensors of a model that ranks share are simulated."""
    original = shared_build.build_for_ranks

    def build_for_ranks(*args: Any) -> Any:
        from tests.support.cards import tensors

        with tensors.simulated():
            return original(*args)

    shared_build.build_for_ranks = build_for_ranks
