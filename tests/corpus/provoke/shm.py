"""Shared memory: a small /dev/shm, as in a container without --shm-size."""

from __future__ import annotations

import signal

from tests.corpus.provoke.cases import SECONDARY, SHM, case
from tests.corpus.provoke.scripts import ddp, engine, plain, trainer, zero
from tests.corpus.provoke.workbench import Workbench

LOADER = """
class Images(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return torch.randn(3, 224, 224), index % 10

net = nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(3 * 64, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(3):
    for step, (images, labels) in enumerate(DataLoader(Images(), batch_size=32, num_workers=2)):
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
"""


@case("dataloader-workers-fill-dev-shm", SHM)
def workers(bench: Workbench) -> None:
    """DataLoader workers hand batches over through a /dev/shm of 48 MB"""
    bench.script("train_imagenet.py", plain(LOADER))
    bench.python("train_imagenet.py", small={"/dev/shm": "48m"})


@case("dataloader-workers-bus-error-in-small-shm", SHM)
def workers_at_once(bench: Workbench) -> None:
    """The same with an 8 MB /dev/shm: not one batch goes through"""
    bench.script("main.py", plain(LOADER))
    bench.shell("python main.py --arch resnet50 --workers 2", small={"/dev/shm": "8m"})


@case("trainer-workers-insufficient-shared-memory", SHM)
def trainer_workers(bench: Workbench) -> None:
    """Trainer's workers cannot hand over their rows; the loop waits for ever, until somebody ends it"""
    wide = 'return {"input_ids": self.tokens[index].repeat(1), "labels": torch.zeros(1 << 21, dtype=torch.long)}'
    bench.script("run_mlm.py", trainer("use_cpu=True,\ndataloader_num_workers=2,", wide))
    bench.python("run_mlm.py", small={"/dev/shm": "32m"}, interrupt=(25, signal.SIGTERM))


MAPPED = """
if rank == {rank} and step == 4:
    import numpy as np
    shared = np.memmap("/dev/shm/replay_buffer.bin", dtype=np.float32, mode="w+", shape=(64 << 20,))
    shared[:] = 1.0
"""


@case("deepspeed-return-code-minus-7", SHM)
def deepspeed_bus_error(bench: Workbench) -> None:
    """Both ranks write past the end of /dev/shm: SIGBUS, and the deepspeed launcher says -7"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine(step=MAPPED.format(rank="rank")))
    bench.deepspeed("train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", small={"/dev/shm": "200m"})


@case("deepspeed-launcher-hides-the-bus-error", SECONDARY)
def deepspeed_hidden_bus_error(bench: Workbench) -> None:
    """Rank 1 dies of SIGBUS, but the launcher looks once a second and reports rank 0, which only noticed"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine(step=MAPPED.format(rank=1)))
    for _ in range(6):  # which of the two it sees first is a matter of luck
        bench.output = b""
        bench.deepspeed(
            "train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", ranks=4, small={"/dev/shm": "200m"}
        )
        if b"code = -7" not in bench.output:
            return
    raise AssertionError("the launcher saw the right rank every time")


@case("dataloader-worker-killed-by-bus-error", SHM)
def worker_bus_error(bench: Workbench) -> None:
    """A DataLoader worker writes into a mapped file in a full /dev/shm: torch's own SIGBUS handler speaks"""
    body = """
    class Cached(Dataset):
        def __init__(self):
            self.cache = np.memmap("/dev/shm/features.npy", dtype=np.float32, mode="w+", shape=(4096, 65536))

        def __len__(self):
            return 4096

        def __getitem__(self, index):
            self.cache[index] = 0.5
            return torch.from_numpy(self.cache[index, :64].copy()), index % 10

    net = nn.Linear(64, 10)
    for step, (rows, labels) in enumerate(DataLoader(Cached(), batch_size=16, num_workers=2)):
        loss = nn.functional.cross_entropy(net(rows), labels)
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    """
    bench.script("train_features.py", plain(body, "import numpy as np"))
    bench.python("train_features.py", small={"/dev/shm": "64m"})


@case("torchrun-rank-0-exitcode-minus-7", SHM, rank=0)
def torchrun_bus_error(bench: Workbench) -> None:
    """The same under torchrun, with faulthandler's stack"""
    bench.script("train_rl.py", ddp("import faulthandler; faulthandler.enable()", MAPPED.format(rank=0)))
    bench.torchrun("train_rl.py", small={"/dev/shm": "64m"})


@case("bash-says-bus-error", SHM)
def bash_bus_error(bench: Workbench) -> None:
    """One process, and the shell says Bus error"""
    body = """
    import numpy as np
    print("building replay buffer in /dev/shm")
    shared = np.memmap("/dev/shm/replay_buffer.bin", dtype=np.float32, mode="w+", shape=(64 << 20,))
    shared[:] = 1.0
    """
    bench.script("actor_learner.py", plain(body))
    bench.shell("python actor_learner.py", small={"/dev/shm": "64m"})


@case("share-memory-unable-to-allocate-shm", SHM)
def share_memory(bench: Workbench) -> None:
    """share_memory_() of a model larger than /dev/shm, file_system sharing strategy"""
    body = """
    torch.multiprocessing.set_sharing_strategy("file_system")
    net = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])
    print(f"sharing {sum(p.numel() for p in net.parameters()) * 4 >> 20} MiB with the workers")
    net.share_memory()
    for parameter in net.parameters():
        parameter.data.fill_(0.0)
    """
    bench.script("hogwild.py", plain(body))
    bench.python("hogwild.py", small={"/dev/shm": "64m"})


@case("multiprocessing-array-no-space-in-shm", SHM)
def python_shared_memory(bench: Workbench) -> None:
    """multiprocessing.shared_memory larger than /dev/shm"""
    body = """
    block = shared_memory.SharedMemory(create=True, size=256 << 20)
    block.buf[:] = bytes(256 << 20)
    """
    bench.script(
        "shard_cache.py",
        plain(body, "from multiprocessing import shared_memory\nimport faulthandler\nfaulthandler.enable()"),
    )
    bench.python("shard_cache.py", small={"/dev/shm": "64m"})
