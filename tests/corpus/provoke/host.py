"""Host memory: limits of a process, the kernel's killer in a cgroup, Ray's memory monitor."""

from __future__ import annotations

from tests.corpus.provoke.cases import HOST, UNKNOWN, case
from tests.corpus.provoke.scripts import DATA_LIMIT, ddp, engine, plain, trainer, zero
from tests.corpus.provoke.workbench import Workbench, memory_cgroup, uptime

HOARD = """
if rank == {rank} and step == {step}:
    cache = []
    while True:
        cache.append(torch.ones(8 << 20))
        time.sleep(0.01)
"""


@case("torchrun-rank-1-cpu-allocator-peer-closed", HOST, rank=1)
def allocator_under_torchrun(bench: Workbench) -> None:
    """torch's CPU allocator under RLIMIT_DATA on rank 1 of 2, rank 0 notices through gloo"""
    script = bench.script(
        "train.py",
        DATA_LIMIT
        + ddp(
            "if rank == 1:\n    limit_memory(700)",
            "if step == 5:\n    x = x.repeat(1 + rank * 2000000, 1)[:, :64]\n    y = y.repeat(1 + rank * 2000000)",
        ),
    )
    bench.torchrun(script)


@case("deepspeed-cpu-allocator-in-optimizer-step", HOST, rank=1)
def allocator_under_deepspeed(bench: Workbench) -> None:
    """AdamW's states do not fit under RLIMIT_DATA on rank 1, under the deepspeed launcher"""
    bench.json("ds_config.json", **zero(0, bf16={"enabled": False}))
    bench.script(
        "pretrain.py", DATA_LIMIT + engine(step="if step == 0 and rank == 1:\n    limit_memory(60)", width=1024)
    )
    bench.deepspeed("pretrain.py", "--deepspeed", "--deepspeed_config", "ds_config.json")


@case("zero3-initialize-cpu-allocator-rank-0-of-2", HOST, rank=0)
def allocator_in_zero3(bench: Workbench) -> None:
    """deepspeed.initialize with ZeRO-3 under RLIMIT_DATA on rank 0"""
    bench.json("ds_config.json", **zero(3))
    limited = "deepspeed.init_distributed('gloo')\nif rank == 0:\n    limit_memory(100)"
    bench.script("train_zero3.py", DATA_LIMIT + engine(setup=limited, width=1024))
    bench.deepspeed("train_zero3.py", "--deepspeed", "--deepspeed_config", "ds_config.json")


@case("memory-error-while-tokenizing", HOST)
def memory_error(bench: Workbench) -> None:
    """Python's bare MemoryError under RLIMIT_AS"""
    body = """
    print("tokenizing corpus.txt")
    limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (300 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    documents = []
    for shard in range(1000):
        documents.append(bytearray(16 << 20))
        print(f"shard {shard}: {len(documents)} documents", flush=True)
    """
    bench.script("prepare_data.py", plain(body, "import resource"))
    bench.python("prepare_data.py")


@case("numpy-array-memory-error-loading-memmap", HOST)
def numpy_memory_error(bench: Workbench) -> None:
    """numpy's _ArrayMemoryError under RLIMIT_AS, in a Dataset's constructor"""
    body = """
    class Embeddings(Dataset):
        def __init__(self, rows):
            self.table = np.zeros((rows, 1024), dtype=np.float32)

        def __len__(self):
            return len(self.table)

    limit = 8 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("Loading embeddings ...")
    data = Embeddings(10_000_000)
    print(len(data))
    """
    bench.script("train_retriever.py", plain(body, "import numpy as np\nimport resource"))
    bench.shell("python train_retriever.py --epochs 3")


@case("bad-alloc-aborts-under-torchrun", HOST, rank=0)
def bad_alloc(bench: Workbench) -> None:
    """std::bad_alloc in a C++ tokenizer thread aborts rank 0 (SIGABRT)"""
    bench.script(
        "native.cpp",
        """
        #include <thread>
        #include <vector>
        extern "C" void build_vocabulary(long pairs) {
            std::thread([pairs] {
                std::vector<std::vector<long>> table;
                for (long i = 0; i < pairs; ++i) table.emplace_back(1 << 20, i);
            }).join();
        }
        """,
    )
    bench.run("g++", "-O1", "-shared", "-fPIC", "-pthread", "-o", "libbpe.so", "native.cpp")
    bench.script(
        "train_tokenizer.py",
        DATA_LIMIT
        + ddp(
            "import ctypes\nbpe = ctypes.CDLL('./libbpe.so')",
            "if step == 3 and rank == 0:\n    limit_memory(500)\n    bpe.build_vocabulary(10**6)",
        ),
    )
    bench.torchrun("train_tokenizer.py")


@case("fork-cannot-allocate-memory-in-dataloader", HOST)
def fork_fails(bench: Workbench) -> None:
    """OSError: [Errno 12] from os.fork: the kernel will not promise the parent's 40 GiB once more to a DataLoader worker"""
    body = """
    class Images(Dataset):
        def __init__(self):
            self.cache = [torch.empty(5 << 30) for _ in range(2)]

        def __len__(self):
            return 1000

        def __getitem__(self, index):
            return torch.zeros(3, 64, 64), index % 10

    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 10))
    data = Images()
    for epoch in range(2):
        for images, labels in DataLoader(data, batch_size=50, num_workers=4):
            loss = nn.functional.cross_entropy(net(images), labels)
        print(f"epoch {epoch} loss {loss.item():.3f}")
    """
    bench.script("train_images.py", plain(body))
    bench.python("train_images.py")


@case("mmap-of-weights-cannot-allocate", HOST)
def mmap_fails(bench: Workbench) -> None:
    """torch.load(mmap=True) of a checkpoint under RLIMIT_AS: unable to mmap"""
    body = """
    weights = {f"layers.{i}.weight": torch.zeros(64 << 20, dtype=torch.uint8) for i in range(16)}
    torch.save(weights, "pytorch_model.bin")
    del weights
    limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (500 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("Loading checkpoint pytorch_model.bin")
    state = torch.load("pytorch_model.bin", mmap=True, map_location="cpu")
    print(len(state))
    """
    bench.script("finetune.py", plain(body, "import resource"))
    bench.python("finetune.py")


@case("cannot-start-new-thread", HOST)
def no_thread(bench: Workbench) -> None:
    """A thread's stack does not fit under RLIMIT_AS: can't start new thread"""
    body = """
    limit = int(open("/proc/self/statm").read().split()[0]) * 4096 + (100 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    prefetchers = []
    for shard in range(64):
        thread = threading.Thread(target=time.sleep, args=(5,), daemon=True)
        thread.start()
        prefetchers.append(thread)
        print(f"prefetching shard {shard}", flush=True)
    """
    bench.script("train_stream.py", plain(body, "import resource\nimport threading\nimport time"))
    bench.python("train_stream.py")


def _cgroup_kill_under_torchrun(bench: Workbench, with_kernel_log: bool) -> None:
    since = uptime()
    bench.script("train.py", ddp(step=HOARD.format(rank=1, step=4)))
    with memory_cgroup("docker/4f1d9c2b77aa", 1200) as group:
        bench.torchrun("train.py", cgroup=group)
    if with_kernel_log:
        bench.say("$ sudo dmesg | tail -n 40\n" + bench.kernel_log(since, 40))


@case("torchrun-rank-1-sigkill-with-dmesg", HOST, rank=1)
def cgroup_kill_with_dmesg(bench: Workbench) -> None:
    """The cgroup's killer takes rank 1 under torchrun; the kernel's own log is pasted after it"""
    _cgroup_kill_under_torchrun(bench, with_kernel_log=True)


@case("torchrun-rank-1-sigkill-nothing-else-said", UNKNOWN, rank=1)
def cgroup_kill_bare(bench: Workbench) -> None:
    """The cgroup's killer takes rank 1 under torchrun, and nothing in the log says so"""
    _cgroup_kill_under_torchrun(bench, with_kernel_log=False)


def _cgroup_kill_under_deepspeed(bench: Workbench, with_kernel_log: bool) -> None:
    since = uptime()
    bench.json("ds_config.json", **zero(2))
    bench.script("pretrain_gpt.py", engine(step=HOARD.format(rank=0, step=6)))
    with memory_cgroup("docker/4f1d9c2b77aa", 1700) as group:
        bench.deepspeed("pretrain_gpt.py", "--deepspeed", "--deepspeed_config", "ds_config.json", cgroup=group)
    if with_kernel_log:
        bench.say("\n--- dmesg ---\n" + bench.kernel_log(since, 12))


@case("deepspeed-return-code-minus-9-with-dmesg", HOST, rank=0)
def deepspeed_cgroup_kill_with_dmesg(bench: Workbench) -> None:
    """The cgroup's killer takes a rank under the deepspeed launcher, kernel log pasted"""
    _cgroup_kill_under_deepspeed(bench, with_kernel_log=True)


@case("deepspeed-exits-with-return-code-minus-9", UNKNOWN)
def deepspeed_cgroup_kill_bare(bench: Workbench) -> None:
    """The cgroup's killer takes a rank under the deepspeed launcher, which only says -9"""
    _cgroup_kill_under_deepspeed(bench, with_kernel_log=False)


@case("bash-says-killed-after-loading-weights", UNKNOWN)
def bash_killed(bench: Workbench) -> None:
    """The cgroup's killer takes a plain python, bash prints Killed, nothing corroborates"""
    body = """
    print("Loading checkpoint shards:   0%|          | 0/8")
    shards = []
    for shard in range(8):
        shards.append(torch.ones(32 << 20))
        print(f"Loading checkpoint shards: {(shard + 1) * 100 // 8:3d}% {shard + 1}/8", flush=True)
    """
    bench.script("serve.py", plain(body))
    with memory_cgroup("user.slice", 600) as group:
        bench.shell("python serve.py", cgroup=group)


@case("bash-killed-and-memory-events-shown", HOST)
def bash_killed_with_counters(bench: Workbench) -> None:
    """The same, but the container's entry point prints the cgroup's counters at the end"""
    body = """
    replay = []
    for episode in range(1000):
        replay.append(torch.ones(16 << 20))
        if episode % 2 == 0:
            print(f"episode {episode} reward {episode * 1.7:.1f} buffer {len(replay)}", flush=True)
    """
    bench.script("train_dqn.py", plain(body))
    with memory_cgroup("job_4711", 700) as group:
        line = (
            'python train_dqn.py; code=$?; echo "exit code $code"; '
            f"grep . {group}/memory.oom_control {group}/memory.failcnt {group}/memory.max_usage_in_bytes; exit $code"
        )
        bench.run("bash", "-c", line, cgroup=group)


@case("dataloader-worker-killed-by-signal-killed", HOST)
def worker_killed(bench: Workbench) -> None:
    """The cgroup's killer takes a DataLoader worker that decodes too much"""
    body = """
    class Videos(Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            if index >= 24:
                self.frames = [torch.ones(4 << 20) for _ in range(200)]
            return torch.zeros(8), index % 4

    net = nn.Linear(8, 4)
    for step, (clips, labels) in enumerate(DataLoader(Videos(), batch_size=4, num_workers=1)):
        loss = nn.functional.cross_entropy(net(clips), labels)
        print(f"step {step} loss {loss.item():.3f}", flush=True)
    """
    bench.script("train_video.py", plain(body))
    with memory_cgroup("docker/9a77", 900) as group:
        bench.python("train_video.py", cgroup=group)


@case("trainer-dataloader-worker-killed", HOST)
def trainer_worker_killed(bench: Workbench) -> None:
    """The cgroup's killer takes a worker of a Hugging Face Trainer"""
    hoard = "if index > 100 and torch.utils.data.get_worker_info() is not None:\n    self.kept = [torch.ones(4 << 20) for _ in range(300)]"
    bench.script("run_clm.py", trainer("dataloader_num_workers=2,\nuse_cpu=True,", hoard, steps=100))
    with memory_cgroup("docker/9a78", 1800) as group:
        bench.python("run_clm.py", cgroup=group)


@case("mp-spawn-one-process-sigkill", UNKNOWN, rank=1)
def spawn_killed(bench: Workbench) -> None:
    """The cgroup's killer takes one process of torch.multiprocessing.spawn; only SIGKILL is seen"""
    body = """
    mp.spawn(work, nprocs=2)
    """
    imports = """
    import time
    import torch.multiprocessing as mp


    def work(index):
        torch.manual_seed(index)
        kept = []
        for step in range(200):
            if index == 1:
                kept.append(torch.ones(4 << 20))
            if step % 5 == 0:
                print(f"[worker {index}] step {step}", flush=True)
            time.sleep(0.02)
    """
    bench.script("spawn_train.py", plain(body, imports))
    with memory_cgroup("docker/11ab", 900) as group:
        bench.python("spawn_train.py", cgroup=group)


@case("trainer-cpu-allocator-evaluation-logits", HOST)
def trainer_allocator(bench: Workbench) -> None:
    """Trainer.evaluate gathers logits until RLIMIT_DATA stops the CPU allocator"""
    end = "trainer.eval_dataset = Packed(rows=4000)\nlimit_memory(200)\ntrainer.predict(trainer.eval_dataset)"
    bench.script(
        "run_eval.py", DATA_LIMIT + trainer("use_cpu=True,\nper_device_eval_batch_size=64,", end=end, steps=10)
    )
    bench.python("run_eval.py")
