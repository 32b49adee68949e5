"""Only the ranks that noticed: the log of the rank that failed is not there."""

from __future__ import annotations

from tests.corpus.provoke.cases import HOST, SECONDARY, UNKNOWN, USER_CODE, case
from tests.corpus.provoke.scripts import DATA_LIMIT, ddp, engine, zero
from tests.corpus.provoke.workbench import Workbench

KEY_ERROR = """
if rank == {rank} and step == 5:
    batch = {{"input_ids": x}}
    y = batch["labels"]
"""
ALLOCATOR = """
if rank == {rank} and step == 5:
    limit_memory(64)
    x = torch.zeros(64 << 20, 64)
"""
PER_RANK = ["--log-dir=logs", "--redirects=3"]


def _keep_ranks(bench: Workbench, *ranks: int, stream: str = "stderr") -> None:
    for rank in ranks:
        bench.keep(f"logs/*/attempt_0/{rank}/{stream}.log", f"rank_{rank}_{{stem}}.log")


@case("only-the-log-of-a-rank-that-noticed", SECONDARY)
def one_of_two(bench: Workbench) -> None:
    """Rank 1 died of the allocator; the file of rank 0 is all there is"""
    bench.script("train.py", DATA_LIMIT + ddp(step=ALLOCATOR.format(rank=1)))
    bench.torchrun("train.py", options=PER_RANK)
    _keep_ranks(bench, 0)


@case("three-of-four-rank-files-without-the-cause", SECONDARY)
def three_of_four(bench: Workbench) -> None:
    """Rank 2 of 4 was killed; the three others' files"""
    bench.script("train.py", ddp(step="if rank == 2 and step == 5:\n    os.kill(os.getpid(), 9)"))
    bench.torchrun("train.py", ranks=4, options=PER_RANK)
    _keep_ranks(bench, 0, 1, 3)


@case("four-rank-files-allocator-on-rank-2", HOST, rank=2)
def four_files(bench: Workbench) -> None:
    """Every rank's file: rank 2 met the allocator's limit, three noticed"""
    bench.script("train.py", DATA_LIMIT + ddp(step=ALLOCATOR.format(rank=2)))
    bench.torchrun("train.py", ranks=4, options=PER_RANK)
    _keep_ranks(bench, 0, 1, 2, 3)


@case("two-rank-files-key-error-on-rank-1", USER_CODE, rank=1)
def two_files(bench: Workbench) -> None:
    """Every rank's file: rank 1 raised KeyError"""
    bench.script("train.py", ddp(step=KEY_ERROR.format(rank=1)))
    bench.torchrun("train.py", options=PER_RANK)
    _keep_ranks(bench, 0, 1)


@case("deepspeed-each-rank-log-without-the-cause", SECONDARY)
def deepspeed_files(bench: Workbench) -> None:
    """--enable_each_rank_log, and only the file of the rank that noticed"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine(step="if rank == 1 and step == 4:\n    sys.exit(3)"))
    bench.deepspeed(
        "train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", options=["--enable_each_rank_log=logs"]
    )
    bench.keep("logs/*rank0.log", "{name}")


@case("deepspeed-each-rank-log-allocator-on-rank-0", HOST, rank=0)
def deepspeed_all_files(bench: Workbench) -> None:
    """--enable_each_rank_log, both files: rank 0 met the allocator's limit"""
    bench.json("ds_config.json", **zero(2))
    step = "if rank == 0 and step == 3:\n    limit_memory(32)\n    tokens = torch.randint(0, 512, (8192, 32))"
    bench.script("train.py", DATA_LIMIT + engine(step=step))
    bench.deepspeed(
        "train.py", "--deepspeed", "--deepspeed_config", "ds_config.json", options=["--enable_each_rank_log=logs"]
    )
    bench.keep("logs/*.log", "{name}")


@case("gloo-all-reduce-timed-out", SECONDARY)
def timeout(bench: Workbench) -> None:
    """Rank 1 sleeps in its data loading, rank 0 times out"""
    bench.script("train.py", ddp(step="if rank == 1 and step == 5:\n    time.sleep(40)", timeout=8))
    bench.torchrun("train.py")


@case("monitored-barrier-names-a-rank", SECONDARY)
def monitored_barrier(bench: Workbench) -> None:
    """monitored_barrier says which rank did not come"""
    step = "if rank == 1 and step == 5:\n    time.sleep(40)\ndist.monitored_barrier(timeout=timedelta(seconds=5))"
    bench.script("train.py", ddp(step=step, timeout=30))
    bench.torchrun("train.py")


@case("store-closed-while-creating-a-group", SECONDARY)
def store_closed(bench: Workbench) -> None:
    """Rank 0, and the store with it, is gone before the process group is made; rank 1's file"""
    bench.script(
        "train.py",
        ddp(
            "if rank == 0:\n    store = dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']) + 1, 2, True, wait_for_workers=False)\n    time.sleep(2)\n    os._exit(1)\nelse:\n    time.sleep(1)\n    store = dist.TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']) + 1, 2, False)\n    store.get('ready')"
        ),
    )
    bench.torchrun("train.py", options=PER_RANK)
    _keep_ranks(bench, 1)


@case("tee-with-prefixes-rank-3-killed", UNKNOWN, rank=3)
def tee(bench: Workbench) -> None:
    """torchrun --tee prefixes every line with its rank; rank 3 was killed by hand"""
    bench.script("train.py", ddp(step="if rank == 3 and step == 5:\n    os.kill(os.getpid(), 9)"))
    bench.torchrun("train.py", ranks=4, options=["--tee=3", "--log-dir=logs"])


@case("tee-with-prefixes-allocator-on-rank-1", HOST, rank=1)
def tee_allocator(bench: Workbench) -> None:
    """torchrun --tee prefixes every line with its rank; rank 1 met the allocator's limit"""
    bench.script("train.py", DATA_LIMIT + ddp(step=ALLOCATOR.format(rank=1)))
    bench.torchrun("train.py", ranks=3, options=["--tee=3", "--log-dir=logs"])
