"""Count the collectives of a backend that moves nothing; let ranks meet where nobody else can."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore  # type: ignore[attr-defined]

from autods.rank.distributed import Traffic, _open_private_store
from tests.support.ends import JOB


@dataclass(frozen=True)
class Block:
    """The part of a tensor's interface that counting needs."""

    elements: int
    each: int = 2

    def numel(self) -> int:
        return self.elements

    def element_size(self) -> int:
        return self.each


@dataclass(frozen=True)
class Group:
    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


@dataclass
class Work:
    waited: int = 0

    def wait(self) -> None:
        self.waited += 1


@dataclass
class Backend:
    """Signatures as those of deepspeed.comm.torch.TorchBackend."""

    world_size: int = 4
    work: Work = field(default_factory=Work)

    def get_world_size(self) -> int:
        return self.world_size

    def all_reduce(self, tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Work:
        return self.work

    def all_gather_into_tensor(self, output_tensor: Any, input_tensor: Any, group: Any = None) -> Work:
        return self.work

    def all_gather_coalesced(self, output_tensors: Any, input_tensors: Any, group: Any = None) -> Work:
        return self.work

    def reduce_scatter_tensor(self, output_tensor: Any, input_tensor: Any, op: Any = None, group: Any = None) -> Work:
        return self.work

    def isend(self, tensor: Any, dst: int) -> Work:
        return self.work

    def irecv(self, tensor: Any, src: int) -> Work:
        return self.work


def listening(backend: Backend) -> Traffic:
    traffic = Traffic(lambda: None)
    traffic.listen(backend)
    return traffic


def counted(traffic: Traffic, name: str) -> tuple[int, int, int]:
    op = traffic.describe().ops[name]
    return op.calls, op.bytes, op.sent_bytes


def test_an_all_reduce_sends_its_tensor_nearly_twice() -> None:
    backend = Backend(world_size=4)
    traffic = listening(backend)
    with traffic.step():
        backend.all_reduce(Block(100), op="sum")
    assert counted(traffic, "all_reduce") == (1, 200, 300)  # 2 × 3/4 of 200


def test_gather_and_scatter_send_all_but_a_ranks_own_part() -> None:
    backend = Backend(world_size=4)
    traffic = listening(backend)
    with traffic.step():
        backend.all_gather_into_tensor(output_tensor=Block(100), input_tensor=Block(25))
        backend.all_gather_coalesced([Block(40), Block(60)], [Block(10), Block(15)])
        backend.reduce_scatter_tensor(Block(25), Block(100))
    assert counted(traffic, "all_gather") == (2, 400, 300)
    assert counted(traffic, "reduce_scatter") == (1, 200, 150)


@pytest.mark.parametrize("by_name", [True, False])
def test_a_group_of_the_ranks_counts_as_its_own_size(by_name: bool) -> None:
    backend = Backend(world_size=4)
    traffic = listening(backend)
    with traffic.step():
        if by_name:
            backend.all_reduce(Block(100), group=Group(2))
        else:
            backend.all_reduce(Block(100), None, Group(2), False)
    assert counted(traffic, "all_reduce") == (1, 200, 200)


def test_a_group_of_one_sends_nothing() -> None:
    backend = Backend(world_size=1)
    traffic = listening(backend)
    with traffic.step():
        backend.all_reduce(Block(100))
    assert counted(traffic, "all_reduce") == (1, 200, 0)


def test_a_point_to_point_transfer_is_counted_once() -> None:
    backend = Backend()
    traffic = listening(backend)
    with traffic.step():
        backend.isend(Block(100), 1)
        backend.irecv(Block(100), 1)
    assert counted(traffic, "send") == (1, 200, 200)
    assert counted(traffic, "recv") == (1, 200, 0)


def test_only_collectives_of_the_last_step_count() -> None:
    backend = Backend()
    traffic = listening(backend)
    with traffic.step():
        backend.all_reduce(Block(100))
    backend.all_reduce(Block(100))
    with traffic.step():
        backend.all_reduce(Block(100))
        backend.all_reduce(Block(100))
    backend.all_reduce(Block(100))
    assert counted(traffic, "all_reduce")[0] == 2


def test_a_step_that_began_goes_on_until_it_ends() -> None:
    backend = Backend()
    traffic = listening(backend)
    for _ in range(3):  # micro batches
        traffic.begin()
        backend.all_reduce(Block(100))
    traffic.end()
    backend.all_reduce(Block(100))
    assert counted(traffic, "all_reduce")[0] == 3


def test_a_counted_step_waits_for_nothing() -> None:
    waits = []
    backend = Backend()
    traffic = Traffic(lambda: waits.append("device"))
    traffic.listen(backend)
    with traffic.step():
        backend.all_reduce(Block(100), async_op=True)
    assert (waits, backend.work.waited) == ([], 0)
    assert traffic.describe().step_s is None
    assert traffic.describe().ops["all_reduce"].seconds is None


def test_a_step_alone_times_each_collective() -> None:
    backend = Backend()
    traffic = listening(backend)
    with traffic.step(alone=True):
        backend.all_reduce(Block(100), async_op=True)
        backend.all_gather_into_tensor(Block(100), Block(25))
    described = traffic.describe()
    assert backend.work.waited == 2
    assert 0 < sum(op.seconds for op in described.ops.values()) < described.step_s


def test_point_to_point_transfers_are_not_timed() -> None:
    backend = Backend()
    traffic = listening(backend)
    with traffic.step(alone=True):
        backend.isend(Block(100), 1)
    assert backend.work.waited == 0
    assert traffic.describe().ops["send"].seconds is None


def test_a_store_of_other_ranks_is_the_scripts_own(tmp_path: Path) -> None:
    """Such as that of a parameter server on another machine."""

    def create(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True) -> str:
        return f"TCPStore of {world_size}"

    job, opened = replace(JOB, private=str(tmp_path)), Counter[int]()
    asked = ("127.0.0.1", 29500, 0)
    assert _open_private_store(job, opened, create, *asked, 3, timedelta(seconds=9)) == "TCPStore of 3"
    store = _open_private_store(job, opened, create, *asked, 2, timedelta(seconds=9))
    assert isinstance(store, FileStore)
    assert store.timeout == timedelta(seconds=9)
    assert store.path == str(tmp_path / "store-29500-0")
