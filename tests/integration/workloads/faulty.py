"""A small model whose last rank meets a fault, chosen anew for each trial by `fault.json` in the fit's folder.

{"fault": one of FAULTS, "phase": build | init | forward | backward | step, "rank": the last one unless said}. The rank
notes the moment, its pid, and pid and beginning of all ranks and of the children it made in `struck.json` beside that
file.
"""

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

_FOLDER = Path("../../..")  # a rank works in <fit>/logs/<trial>/scratch


class Model(torch.nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.layer = torch.nn.Linear(16, 1)
        self.fault = fault

    def _apply(self, *args, **kwargs):  # deepspeed.initialize casts and moves the model
        self.fault.strike_at("init")
        return super()._apply(*args, **kwargs)

    def forward(self, x):
        self.fault.strike_at("forward")
        loss = self.layer(x).square().mean()
        loss.register_hook(lambda gradient: self.fault.strike_at("backward"))
        self.fault.trained = True
        return loss


def build_model():
    fault = Fault.chosen()
    fault.strike_at("build")
    register_optimizer_step_pre_hook(lambda *_: fault.strike_at_step())
    return Model(fault)


def build_batch(micro_batch_size):
    return {"x": torch.ones(micro_batch_size, 16)}


class Fault:
    """What this rank shall meet, if anything."""

    def __init__(self, name, phase):
        self.name, self.phase = name, phase
        self.trained = False

    @classmethod
    def chosen(cls):
        rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        try:
            said = json.loads((_FOLDER / "fault.json").read_text())
        except OSError:
            return cls(None, None)
        mine = world > 1 and rank == said.get("rank", world - 1)
        return cls(said["fault"], said["phase"]) if mine else cls(None, None)

    def strike_at_step(self):
        if self.trained:  # DeepSpeed steps once in initialize, to make the optimizer's state: that is not meant
            self.strike_at("step")

    def strike_at(self, phase):
        if phase == self.phase:
            self.phase = None
            children = strays() if self.name == "strays" else []
            ranks = map(int, Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split())
            note = {"at_s": time.monotonic(), "pid": os.getpid()}
            note |= {"ranks": list(map(began, ranks)), "children": list(map(began, children))}
            Path("struck.tmp").write_text(json.dumps(note))
            os.replace("struck.tmp", _FOLDER / "struck.json")
            FAULTS[self.name]()


def began(pid):
    """The process and when it began: pids come again."""
    return pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def strays():
    """Three children: in our process group; in a session of its own; a daemon that will not hear SIGTERM."""
    reader, writer = os.pipe()

    def child(then):
        if os.fork() == 0:
            then()
            os._exit(0)

    def linger():
        os.write(writer, b"%d\n" % os.getpid())
        while True:
            time.sleep(1)

    def session():
        os.setsid()
        linger()

    def daemon():
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child(linger)

    for then in (linger, session, daemon):
        child(then)
    said = b""
    while said.count(b"\n") < 3:
        said += os.read(reader, 100)
    return [int(pid) for pid in said.split()]


def pools():
    """Processes and shared memory of every kind: a pool, shared tensors, a segment that nobody unlinks, strays."""
    _KEPT.append(torch.multiprocessing.get_context("fork").Pool(2))
    _KEPT.append(torch.multiprocessing.get_context("spawn").Semaphore())
    _KEPT.append([torch.ones(1000).share_memory_() for _ in range(3)])
    _KEPT.append(SharedMemory(create=True, size=4096))
    strays()


def signal_self(number):
    return lambda: os.kill(os.getpid(), number)


def signal_from_outside(number):
    """Another process sends it, as a person or the kernel would."""

    def strike():
        if os.fork() == 0:
            os.kill(os.getppid(), number)
            os._exit(0)
        hang()

    return strike


def throw():
    raise RuntimeError("made to fail")


def hang():
    while True:
        time.sleep(1)


def closed_connections():
    """As when the network of this rank goes away: its connections end, the process goes on."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                link = socket.socket(fileno=os.dup(int(name)))
                if not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    link.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def in_a_dataloader_worker(what):
    return lambda: list(torch.utils.data.DataLoader(DeadlyData(what), num_workers=1))


class DeadlyData(torch.utils.data.Dataset):
    def __init__(self, what):
        self.what = what

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.what()


def bus_error():
    """Write into a shared mapping of a file on a file system that is full (`small` beside fault.json)."""
    with open(_FOLDER / "small" / "shared", "w+b") as file:
        os.ftruncate(file.fileno(), 2**24)
        memory = mmap.mmap(file.fileno(), 2**24)
        for start in range(0, 2**24, 4096):
            memory[start] = 1


def full_disk():
    with open(_FOLDER / "small" / "swap", "wb", buffering=0) as file:
        while True:
            file.write(bytes(2**20))


def until_killed():
    """Take memory until the OOM killer of the cgroup strikes. In a full cgroup the kernel may refuse some first."""
    kept, refused = [], 0
    while refused < 4000:  # other ranks that are slower have to fill the rest
        try:
            kept.append(b"x" * 2**24)
        except MemoryError:
            refused += 1
            time.sleep(0.01)
    group = Path("/proc/self/cgroup").read_text().split()
    raise RuntimeError(f"nobody killed a process of {len(kept)} times 16 MiB, in the cgroups {group}")


def wrong_shape():
    torch.ones(3, 4) @ torch.ones(5, 6)


_KEPT = []
FAULTS = {
    "pools": lambda: (pools(), throw()),
    "pools and hang": lambda: (pools(), hang()),
    "SIGKILL": signal_from_outside(signal.SIGKILL),
    "SIGSEGV": signal_self(signal.SIGSEGV),
    "a crash in C": lambda: ctypes.string_at(0),
    "SIGABRT": signal_self(signal.SIGABRT),
    "SIGSTOP": signal_from_outside(signal.SIGSTOP),
    "os._exit(0)": lambda: os._exit(0),
    "exception": throw,
    "strays": throw,
    "out of memory": lambda: torch.zeros(64 * 2**30, dtype=torch.uint8),
    "hang": hang,
    "closed connections": closed_connections,
    "DataLoader worker killed": in_a_dataloader_worker(signal_self(signal.SIGKILL)),
    "DataLoader worker until killed": in_a_dataloader_worker(until_killed),
    "bus error": bus_error,
    "full disk": full_disk,
    "until killed": until_killed,
    "wrong shape": wrong_shape,
    "missing package": lambda: __import__("flash_attn_of_nobody"),
    "sys.exit": lambda: sys.exit(3),
}
