"""A machine with cards that do not exist: the file behind the stand-in driver, and processes that see it.

`driver.c` answers NVML's questions from the file. Ranks enter there what they hold (`hooks`), and tests change it
while a fit runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
GIB, MIB = 2**30, 2**20
VARIABLE = "AUTODS_TEST_CARDS"  # the path of the file
CONTEXT_BYTES = 300 * MIB  # of a process that uses a card
NCCL_BYTES = 200 * MIB  # from its communicator on
_MAGIC = 0x41435244


class Card(ctypes.Structure):
    """A card or MIG slice as `driver.c` has it; `parent` is the index of a slice's card, else -1."""

    _fields_ = (
        ("name", ctypes.c_char * 64),
        ("uuid", ctypes.c_char * 64),
        ("total_bytes", ctypes.c_uint64),
        ("driver_bytes", ctypes.c_uint64),
        ("parent", ctypes.c_int32),
        ("mig", ctypes.c_int32),
        ("lost", ctypes.c_int32),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class Holding(ctypes.Structure):
    """What a process holds on a card."""

    _fields_ = (("pid", ctypes.c_int32), ("card", ctypes.c_int32), ("bytes", ctypes.c_uint64))


class State(ctypes.Structure):
    """The whole file."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("problem", ctypes.c_int32),
        ("cuda", ctypes.c_int32),
        ("cards", ctypes.c_int32),
        ("holdings", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("driver", ctypes.c_char * 64),
        ("card", Card * 16),
        ("holding", Holding * 64),
    )


class Machine:
    """The cards of a file. Several processes may have it open; a process enters and changes only its own holding."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), ctypes.sizeof(State))
        self.state = State.from_buffer(self._memory)

    @classmethod
    def make(cls, path: Path) -> Machine:
        """Make a machine without cards, whose driver runs CUDA 13.0."""
        path.write_bytes(bytes(ctypes.sizeof(State)))
        machine = cls(path)
        machine.state.magic, machine.state.cuda, machine.state.driver = _MAGIC, 13000, b"580.95.05"
        return machine

    def add(
        self,
        uuid: str,
        *,
        name: str = "NVIDIA Simulated 16GB",
        total_bytes: int = 16 * GIB,
        capability: tuple[int, int] = (9, 0),
        slice_of: int | None = None,
        mig: bool | None = None,
    ) -> int:
        """Add a card, or a slice of the card with that index; return its index. Without `mig` it knows no MIG."""
        index = self.state.cards
        card = self.state.card[index]
        card.name, card.uuid, card.total_bytes, card.driver_bytes = name.encode(), uuid.encode(), total_bytes, GIB // 2
        card.parent = -1 if slice_of is None else slice_of
        card.mig = -1 if mig is None else int(mig)
        card.lost, (card.major, card.minor) = 0, capability
        self.state.cards += 1
        return index

    def visible(self, variable: str | None) -> list[int]:
        """The indices of the cards that CUDA_VISIBLE_DEVICES shows, by the rules of NVIDIA's guides."""
        cards = [self.state.card[index] for index in range(self.state.cards)]
        whole = [index for index, card in enumerate(cards) if card.parent < 0]
        shown: list[int] = []
        for name in map(str, range(len(whole))) if variable is None else variable.split(","):
            named = [index for index, card in enumerate(cards) if card.uuid.decode().startswith(name)] if name else []
            if name.isdigit():
                named = whole[int(name) : int(name) + 1]
            if len(named) != 1:
                break
            shown += named
        slices = [index for index in shown if cards[index].parent >= 0]
        if not slices and shown and all(cards[index].mig == 1 for index in shown):
            slices = [index for index, card in enumerate(cards) if card.parent in shown]
        return slices[:1] or [index for index in shown if cards[index].mig != 1]

    def hold(self, pid: int, index: int, size: int) -> None:
        """Enter what a process holds on a card, in place of what it held there before."""
        state = self.state
        with open(self.path) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for number in range(state.holdings):
                holding = state.holding[number]
                if (holding.pid, holding.card) == (pid, index) or not is_alive(holding.pid):
                    break
            else:
                number = state.holdings
            state.holding[number] = Holding(pid, index, size)
            state.holdings = max(state.holdings, number + 1)

    def used_bytes(self, index: int) -> int:
        """What living processes hold on a card."""
        holdings = (self.state.holding[number] for number in range(self.state.holdings))
        return sum(holding.bytes for holding in holdings if holding.card == index and is_alive(holding.pid))

    def holders(self, index: int) -> Iterator[tuple[int, int]]:
        """The living processes on a card, with their bytes."""
        for number in range(self.state.holdings):
            holding = self.state.holding[number]
            if holding.card == index and is_alive(holding.pid):
                yield holding.pid, holding.bytes


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that waits to be reaped has closed its files already."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def build_driver(folder: Path) -> Path:
    """Compile the stand-in driver; return the folder of its libraries."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", str(HERE / "driver.c"), "-o", library], check=True
    )
    shutil.copy(library, folder / "libcuda.so.1")
    return folder


def environment(machine: Machine, libraries: Path, visible: str | None = None) -> dict[str, str]:
    """The variables of a process, and of all that it starts, on that machine."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DS_ACCELERATOR")
    }
    paths = [str(HERE / "preload"), str(HERE.parents[2]), variables.get("PYTHONPATH", "")]
    libraries_path = [str(libraries), variables.get("LD_LIBRARY_PATH", "")]
    variables |= {
        VARIABLE: str(machine.path),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries_path)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    return variables | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
