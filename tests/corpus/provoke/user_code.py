"""The user's script, data or model: nothing here is memory, whatever it says."""

from __future__ import annotations

from collections.abc import Callable

from tests.corpus.provoke.cases import PRESSURE, USER_CODE, case
from tests.corpus.provoke.scripts import DATA_LIMIT, ddp, engine, plain, trainer, zero
from tests.corpus.provoke.workbench import Workbench

# name → what is wrong, the rank, how many ranks, the lines put into the training loop
UNDER_TORCHRUN: dict[str, tuple[str, int | None, int, str]] = {
    "torchrun-shape-mismatch-on-rank-1": (
        "a batch of another width on rank 1",
        1,
        2,
        "if rank == 1 and step == 3:\n    x = x[:, :48]",
    ),
    "torchrun-nan-assertion-on-rank-0": (
        "an assertion about NaN on rank 0",
        0,
        2,
        "if rank == 0 and step == 6:\n    loss = torch.tensor(float('nan'))\n"
        "    assert torch.isfinite(loss), f'loss is {loss.item()} at step {step}, memory 79.1GiB/80GiB'",
    ),
    "torchrun-sys-exit-3-on-rank-2": (
        "sys.exit(3) without a word on rank 2",
        2,
        3,
        "if rank == 2 and step == 4:\n    sys.exit(3)",
    ),
    "torchrun-zero-division-on-all-ranks": (
        "the same exception on every rank",
        None,
        2,
        "if step == 4:\n    scale = 1.0 / (step - 4)",
    ),
    "torchrun-different-shapes-over-gloo": (
        "all_gather with another shape on rank 1",
        None,
        2,
        "if step == 4:\n    parts = [torch.zeros(8) for _ in range(world)]\n    dist.all_gather(parts, torch.zeros(8 + rank))",
    ),
    "torchrun-file-of-rank-1-not-found": (
        "a data shard that is missing for rank 1",
        1,
        2,
        "if rank == 1 and step == 2:\n    x = torch.load(f'data/shard_{rank:05d}.pt')",
    ),
    "torchrun-token-budget-out-of-memory-words": (
        "a ValueError whose text says out of memory, meaning a budget of tokens",
        1,
        2,
        "if rank == 1 and step == 5:\n    raise ValueError('sample 1187 is out of memory budget of 4096 tokens (got 5120)')",
    ),
}


def _under_torchrun(doc: str, ranks: int, step: str) -> Callable[[Workbench], None]:
    def fail(bench: Workbench) -> None:
        bench.script("train.py", ddp(step=step))
        bench.torchrun("train.py", ranks=ranks)

    fail.__doc__ = doc
    return fail


for _name, (_doc, _rank, _ranks, _step) in UNDER_TORCHRUN.items():
    case(_name, USER_CODE, rank=_rank)(_under_torchrun(_doc, _ranks, _step))


@case("ddp-unused-parameters", USER_CODE)
def unused_parameters(bench: Workbench) -> None:
    """DDP finds parameters that took no part in the loss"""
    bench.script("train.py", ddp().replace("return self.head(self.body(x))", "return self.body(x)[:, :10]"))
    bench.torchrun("train.py")


@case("deepspeed-index-out-of-range-in-embedding", USER_CODE, rank=1)
def embedding(bench: Workbench) -> None:
    """A token id beyond the vocabulary on rank 1, under the deepspeed launcher"""
    bench.json("ds_config.json", **zero(2))
    bench.script("pretrain.py", engine(step="if rank == 1 and step == 5:\n    tokens[0, 0] = 51200"))
    bench.deepspeed("pretrain.py", "--deepspeed", "--deepspeed_config", "ds_config.json")


@case("deepspeed-argparse-unrecognized-arguments", USER_CODE)
def argparse_error(bench: Workbench) -> None:
    """argparse does not know an option: exit code 2"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine())
    bench.deepspeed("train.py", "--deepspeed_config", "ds_config.json", "--gradient-checkpoint")


@case("trainer-key-error-in-the-data-set", USER_CODE)
def trainer_key_error(bench: Workbench) -> None:
    """KeyError in the Trainer's data set"""
    bench.script(
        "run_clm.py",
        trainer("use_cpu=True,", 'if index == 77:\n    return {"tokens": self.tokens[index]}["input_ids"]'),
    )
    bench.python("run_clm.py")


@case("trainer-model-got-unexpected-keyword", USER_CODE)
def trainer_forward(bench: Workbench) -> None:
    """The collator passes a column that the model does not take"""
    column = 'return {"input_ids": self.tokens[index], "labels": self.tokens[index][:16]}'
    bench.script("run_clm.py", trainer("use_cpu=True,\nremove_unused_columns=False,", column))
    bench.python("run_clm.py")


@case("dataloader-worker-raises-value-error", USER_CODE)
def worker_error(bench: Workbench) -> None:
    """An exception in a DataLoader worker"""
    body = """
    class Rows(Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return torch.zeros(4), int("7" if index < 60 else "N/A")

    for step, (rows, labels) in enumerate(DataLoader(Rows(), batch_size=8, num_workers=2)):
        print(f"step {step}", flush=True)
    """
    bench.script("train_tabular.py", plain(body))
    bench.python("train_tabular.py")


@case("autograd-in-place-modification", USER_CODE)
def in_place(bench: Workbench) -> None:
    """A tensor needed for the gradient was changed in place"""
    body = """
    x = torch.randn(8, 8, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()
    """
    bench.script("train_flow.py", plain(body))
    bench.python("train_flow.py")


@case("recursion-in-a-tree-model", USER_CODE)
def recursion(bench: Workbench) -> None:
    """Recursion without an end"""
    body = """
    def encode(node, depth=0):
        return encode(node.get("left", node), depth + 1)
    encode({})
    """
    bench.script("train_tree.py", plain(body))
    bench.python("train_tree.py")


@case("backward-second-time-in-subprocess", USER_CODE)
def spawned(bench: Workbench) -> None:
    """An exception in one process of torch.multiprocessing.spawn"""
    imports = """
    import torch.multiprocessing as mp


    def work(index):
        net = nn.Linear(4, 1)
        loss = net(torch.randn(2, 4)).sum()
        loss.backward()
        loss.backward()
    """
    bench.script("spawn_train.py", plain("mp.spawn(work, nprocs=1)", imports))
    bench.python("spawn_train.py")


@case("own-class-named-memory-budget-exceeded", USER_CODE)
def own_class(bench: Workbench) -> None:
    """The user's own exception with Memory in its name: a replay memory is empty"""
    body = """
    class ReplayMemoryError(Exception):
        pass

    class ReplayMemory:
        def __init__(self, capacity):
            self.items, self.capacity = [], capacity

        def sample(self, count):
            if len(self.items) < count:
                raise ReplayMemoryError(f"cannot sample {count} transitions: memory holds {len(self.items)}")

    memory = ReplayMemory(10000)
    for episode in range(3):
        print(f"episode {episode} return {episode * 2.5} memory {len(memory.items)}/{memory.capacity}", flush=True)
    memory.sample(64)
    """
    bench.script("train_dqn.py", plain(body))
    bench.python("train_dqn.py")


ADAPT = """
import torch
limit = {limit}
torch.OutOfMemoryError = getattr(torch, "OutOfMemoryError", RuntimeError)

def train_step(batch):
    if batch > limit:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.02 GiB is "
            "free. Including non-PyTorch memory, this process has 78.12 GiB memory in use. Of the allocated memory 74.30 GiB "
            "is allocated by PyTorch, and 2.81 GiB is reserved by PyTorch but unallocated."
        )
    return 2.0 / batch
"""
HALVE = """
batch = 32
for step in range(8):
    try:
        loss = train_step(batch)
    except torch.OutOfMemoryError as error:
        print(f"| WARNING: ran out of memory with exception: {error}", file=sys.stderr)
        batch //= 2
        print(f"retrying with batch size {batch}", file=sys.stderr)
        continue
    print(f"step {step} batch {batch} loss {loss:.4f}", flush=True)
"""


@case("recovers-from-oom-by-halving-the-batch", PRESSURE)
def recovers(bench: Workbench) -> None:
    """The script catches an out-of-memory error (torch's type and words, simulated), halves the batch and finishes"""
    bench.script("train_adaptive.py", plain(HALVE + 'print("training finished")', ADAPT.format(limit=8)))
    bench.python("train_adaptive.py")


@case("recovers-from-oom-then-key-error", USER_CODE)
def recovers_then_fails(bench: Workbench) -> None:
    """The same script, which later dies of a KeyError"""
    bench.script("train_adaptive.py", plain(HALVE + 'print({"loss": loss}["eval_loss"])', ADAPT.format(limit=8)))
    bench.python("train_adaptive.py")


@case("cpu-allocator-caught-then-type-error", USER_CODE)
def allocator_caught(bench: Workbench) -> None:
    """A real error of the CPU allocator is caught and logged; the run dies of a TypeError"""
    body = """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    limit_memory(400)
    try:
        cache = torch.zeros(1 << 30)
    except RuntimeError:
        logging.exception("feature cache disabled")
        cache = None
    for step in range(20):
        logging.info("step %d loss %.3f", step, 2.0 - step / 20)
        if step == 12:
            row = cache[step]
    """
    bench.script("train_cached.py", DATA_LIMIT + plain(body, "import logging"))
    bench.python("train_cached.py")


@case("trainer-find-batch-size-by-halving-works", PRESSURE)
def find_batch_size(bench: Workbench) -> None:
    """Trainer's auto_find_batch_size catches the CPU allocator's errors until a batch fits"""
    script = DATA_LIMIT + trainer("use_cpu=True,\nauto_find_batch_size=True,", setup="limit_memory(900)", steps=3)
    script = script.replace("per_device_train_batch_size=4", "per_device_train_batch_size=8192").replace(
        "rows=256", "rows=16384"
    )
    bench.script("run_clm.py", script)
    bench.python("run_clm.py")
