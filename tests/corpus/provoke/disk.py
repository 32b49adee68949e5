"""Disks that are full, small or limited: checkpoints, NVMe swap, logs, caches."""

from __future__ import annotations

from tests.corpus.provoke.cases import DISK, case
from tests.corpus.provoke.scripts import ddp, engine, plain, trainer, zero
from tests.corpus.provoke.workbench import Workbench


def _small(bench: Workbench, folder: str, size: str) -> dict[str, str]:
    return {str(bench.project / folder): size}


@case("torch-save-disk-full", DISK)
def torch_save(bench: Workbench) -> None:
    """torch.save of 64 MiB on a file system of 16 MiB"""
    body = """
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
    for epoch in range(2):
        print(f"epoch {epoch} loss {2.3 - epoch / 10:.3f}")
        torch.save({"model": net.state_dict(), "epoch": epoch}, f"checkpoints/epoch_{epoch}.pt")
    """
    bench.script("train.py", plain(body))
    bench.python("train.py", small=_small(bench, "checkpoints", "16m"))


@case("ddp-rank-0-torch-save-disk-full-peers-wait", DISK, rank=0)
def ddp_save(bench: Workbench) -> None:
    """Rank 0 saves a checkpoint on a full disk, rank 1 waits at the barrier and is cut off"""
    end = """
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "pad": torch.zeros(8 << 20)}, "checkpoints/last.pt")
    dist.barrier()
    """
    bench.script("train.py", ddp(end=end))
    bench.torchrun("train.py", small=_small(bench, "checkpoints", "8m"))


@case("deepspeed-save-checkpoint-disk-full", DISK)
def deepspeed_save(bench: Workbench) -> None:
    """engine.save_checkpoint with ZeRO-2 on a file system that is too small"""
    bench.json("ds_config.json", **zero(2))
    bench.script("pretrain.py", engine(end='engine.save_checkpoint("checkpoints", tag="global_step12")', width=512))
    bench.deepspeed(
        "pretrain.py", "--deepspeed", "--deepspeed_config", "ds_config.json", small=_small(bench, "checkpoints", "20m")
    )


@case("trainer-checkpoint-safetensors-disk-full", DISK)
def trainer_save(bench: Workbench) -> None:
    """Trainer's second checkpoint does not fit"""
    script = trainer("use_cpu=True,", steps=30).replace(
        'save_strategy="no"', 'save_strategy="steps",\n        save_steps=10'
    )
    bench.script("run_clm.py", script)
    bench.python("run_clm.py", small=_small(bench, "out", "2m"))


SWAP = {
    "bf16": {"enabled": True},
    "zero": {
        "sub_group_size": 200000,
        "stage3_param_persistence_threshold": 0,
        "offload_optimizer": {
            "device": "nvme", "nvme_path": "swap", "buffer_count": 4, "pin_memory": False,
        },
    },
    "aio": {"block_size": 1 << 20, "queue_depth": 4, "use_gds": False},
}  # fmt: skip


@case("zero3-optimizer-swap-fills-nvme", DISK, rank=0)
def optimizer_swap(bench: Workbench) -> None:
    """ZeRO-Infinity's optimizer swap on a file system that is too small"""
    config = zero(3, **SWAP)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4}}
    bench.json("ds_config.json", **config)
    bench.script("train_infinity.py", engine(width=512))
    bench.deepspeed(
        "train_infinity.py", "--deepspeed", "--deepspeed_config", "ds_config.json", small=_small(bench, "swap", "24m")
    )


@case("zero3-parameter-swap-fills-nvme", DISK, rank=0)
def parameter_swap(bench: Workbench) -> None:
    """ZeRO-Infinity's parameter swap on a file system that is too small"""
    offload = {"device": "nvme", "nvme_path": "swap", "buffer_count": 5, "buffer_size": 2000000, "pin_memory": False}
    zeros = {"stage3_param_persistence_threshold": 0, "sub_group_size": 2000000, "offload_param": offload}
    zeros["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config = zero(3, zero=zeros, aio=SWAP["aio"])
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4}}
    bench.json("ds_config.json", **config)
    bench.script("train_infinity.py", engine(width=512))
    bench.deepspeed(
        "train_infinity.py", "--deepspeed", "--deepspeed_config", "ds_config.json", small=_small(bench, "swap", "6m")
    )


@case("metrics-log-no-space-left-on-device", DISK)
def log_file(bench: Workbench) -> None:
    """A metrics file grows until the disk is full"""
    body = """
    with open("logs/metrics.jsonl", "w", buffering=1) as metrics:
        for step in range(100000):
            metrics.write(json.dumps({"step": step, "loss": 2.3, "grad_norm": [0.1] * 400}) + "\\n")
            if step % 100 == 0:
                print(f"step {step} loss 2.3", flush=True)
    """
    bench.script("train.py", plain(body, "import json"))
    bench.python("train.py", small=_small(bench, "logs", "1m"))


@case("numpy-tofile-short-write", DISK)
def short_write(bench: Workbench) -> None:
    """numpy writes fewer items than asked: a short write, without the word space"""
    body = """
    for shard in range(8):
        block = np.random.randint(0, 50257, size=1 << 20, dtype=np.uint16)
        block.tofile(f"cache/shard_{shard:05d}.bin")
        print(f"wrote cache/shard_{shard:05d}.bin ({block.nbytes >> 20} MiB)", flush=True)
    """
    bench.script("tokenize_corpus.py", plain(body, "import numpy as np"))
    bench.python("tokenize_corpus.py", small=_small(bench, "cache", "5m"))


@case("checkpoint-beyond-file-size-limit", DISK)
def file_size_limit(bench: Workbench) -> None:
    """RLIMIT_FSIZE, as a quota would: File too large"""
    body = """
    with open("checkpoint.bin", "wb") as file:
        for shard in range(64):
            file.write(bytes(4 << 20))
            print(f"wrote shard {shard}", flush=True)
    """
    bench.script("consolidate.py", plain(body))
    bench.run("bash", "-c", "ulimit -f 20480; python consolidate.py")


@case("op-build-no-space-in-tmp", DISK)
def op_build(bench: Workbench) -> None:
    """The compiler of a DeepSpeed op writes its temporaries on a full /tmp"""
    config = zero(2, zero={"offload_optimizer": {"device": "cpu"}})
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 3e-4}}
    bench.json("ds_config.json", **config)
    bench.script("train.py", engine())
    bench.deepspeed(
        "train.py",
        "--deepspeed",
        "--deepspeed_config",
        "ds_config.json",
        ranks=1,
        env={"TORCH_EXTENSIONS_DIR": str(bench.root / "ext"), "MAX_JOBS": "1"},
        small={str(bench.root / "tmp"): "400k", str(bench.root / "ext"): "100k"},
    )
