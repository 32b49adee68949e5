"""What a card holds besides tensors, step by step: the CUDA context, the kernels' code, cuBLAS's workspaces, NCCL.

python tests/gpu/gpu_context.py cuda|cpu RANKS      one JSON object, rank 0's; each rank is a process of its own

held_bytes: NVML's count of the card, less what it held before and what torch's allocator reserves; of CPU ranks the
process's private memory. allocated_bytes: what torch's allocator gave out that is no tensor of ours.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autods.devices.cuda import read_used_bytes
from autods.rank.memory import status_bytes

_SIZE = 1024


def main(argv: list[str]) -> int:
    device, ranks = argv[0], int(argv[1])
    if "RANK" in os.environ:
        said = steps(device, int(os.environ["RANK"]), ranks)
        if os.environ["RANK"] == "0":
            print(json.dumps(said), flush=True)
        return 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if device == "cpu":
        common |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, __file__, device, str(ranks)]
    started = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)
    ]
    return max(abs(process.wait()) for process in started)


def steps(device: str, rank: int, ranks: int) -> dict[str, Any]:
    """This rank's readings, in order."""
    before = _card(rank) if device == "cuda" else status_bytes("RssAnon")["RssAnon"]
    import torch
    from torch import distributed

    cuda = torch.cuda if device == "cuda" else None
    found: list[dict[str, Any]] = []

    def read(name: str) -> None:
        if cuda is None:
            held, reserved, given = status_bytes("RssAnon")["RssAnon"], 0, None
        else:
            cuda.synchronize()
            held, reserved, given = _card(rank), cuda.memory_reserved(), cuda.memory_allocated()
        known = None if held is None or before is None else held - before - reserved
        found.append({"step": name, "held_bytes": known, "allocated_bytes": given})

    if cuda is not None:
        cuda.set_device(rank)
        cuda.synchronize()
    read("context")
    _compute(torch, "cuda" if cuda else "cpu")
    read("kernels")
    distributed.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=ranks)
    _communicate(torch, distributed, "cuda" if cuda else "cpu", ranks)
    read("collectives")
    distributed.destroy_process_group()
    said: dict[str, Any] = {"device": device, "world_size": ranks, "steps": found}
    if cuda is not None:
        properties = cuda.get_device_properties(rank)
        said |= {
            "name": properties.name, "total_bytes": int(properties.total_memory),
            "capability": [properties.major, properties.minor],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if ranks else None,
        }  # fmt: skip
    return said


def _card(rank: int) -> int | None:
    held = read_used_bytes(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return held[rank] if held is not None and rank < len(held) else None


def _compute(torch: Any, device: str) -> None:
    """The kinds of kernels of a training step; every tensor is gone afterwards."""
    layer = torch.nn.Linear(_SIZE, _SIZE, device=device, dtype=torch.float32)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4)
    for _ in range(2):
        heads = layer(torch.randn(4, 128, _SIZE, device=device)).view(4, 128, 16, 64).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        loss = torch.nn.functional.layer_norm(mixed, (64,)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _communicate(torch: Any, distributed: Any, device: str, ranks: int) -> None:
    part = torch.ones(2**18, device=device)
    whole = torch.empty(ranks * part.numel(), device=device)
    distributed.all_reduce(part)
    distributed.all_gather_into_tensor(whole, part)
    if device == "cuda":
        distributed.reduce_scatter_tensor(part, whole)
    distributed.barrier()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
