"""Signals, time limits, permissions, descriptors: the machine or the people who run it."""

from __future__ import annotations

import signal

from tests.corpus.provoke.cases import MACHINE, STOPPED, UNKNOWN, case
from tests.corpus.provoke.scripts import ddp, engine, plain, trainer, zero
from tests.corpus.provoke.workbench import Workbench

SLOW = "time.sleep(0.3)"
LONG = 400


@case("torchrun-gets-sigterm", STOPPED)
def sigterm(bench: Workbench) -> None:
    """The scheduler ends torchrun with SIGTERM"""
    bench.script("train.py", ddp(step=SLOW, steps=LONG))
    bench.torchrun("train.py", interrupt=("step 6", signal.SIGTERM))


@case("deepspeed-gets-sigterm", STOPPED)
def deepspeed_sigterm(bench: Workbench) -> None:
    """The scheduler ends the deepspeed launcher and its ranks with SIGTERM"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine(step=SLOW, steps=LONG))
    bench.deepspeed(
        "train.py",
        "--deepspeed",
        "--deepspeed_config",
        "ds_config.json",
        interrupt=("step=6", signal.SIGTERM),
        group=True,
    )


@case("torchrun-ctrl-c", STOPPED)
def control_c(bench: Workbench) -> None:
    """Ctrl-C: SIGINT for the whole group"""
    bench.script("train.py", ddp(step=SLOW, steps=LONG))
    bench.torchrun("train.py", interrupt=("step 6", signal.SIGINT), group=True)


@case("trainer-keyboard-interrupt", STOPPED)
def trainer_interrupted(bench: Workbench) -> None:
    """Ctrl-C in a Trainer with a progress bar"""
    bench.script("run_clm.py", trainer("use_cpu=True,", "import time; time.sleep(0.02)", steps=500))
    bench.python("run_clm.py", interrupt=("2/500", signal.SIGINT))


@case("timeout-ends-the-run-with-124", STOPPED)
def time_limit(bench: Workbench) -> None:
    """timeout(1) ends the run: exit code 124, and the log just stops"""
    bench.script("train.py", ddp(step=SLOW, steps=LONG))
    bench.run("timeout", "12", "torchrun", "--nproc-per-node=1", "--master-port=29533", "train.py")


@case("signal-handler-saves-and-exits-before-preemption", STOPPED)
def preemption(bench: Workbench) -> None:
    """The script's handler of SIGUSR1 saves a checkpoint and leaves"""
    body = """
    def leave(number, frame):
        print("received SIGUSR1: job will be preempted in 120 s, saving checkpoint and requeueing", flush=True)
        torch.save({}, "last.pt")
        sys.exit(143)

    signal.signal(signal.SIGUSR1, leave)
    for step in range(1000):
        print(f"step {step} loss {3 - step / 1000:.3f}", flush=True)
        time.sleep(0.2)
    """
    bench.script("train.py", plain(body, "import signal\nimport time"))
    bench.python("train.py", interrupt=("step 8", signal.SIGUSR1))


@case("torchrun-rank-1-killed-by-hand", UNKNOWN, rank=1)
def killed(bench: Workbench) -> None:
    """Somebody kills rank 1 with SIGKILL; nobody says why"""
    bench.script("train.py", ddp(step="if rank == 1 and step == 7:\n    os.kill(os.getpid(), 9)"))
    bench.torchrun("train.py")


@case("segmentation-fault-on-rank-0", UNKNOWN, rank=0)
def segmentation_fault(bench: Workbench) -> None:
    """A null pointer read through ctypes on rank 0"""
    bench.script("train.py", ddp(step="if rank == 0 and step == 5:\n    import ctypes; ctypes.string_at(0)"))
    bench.torchrun("train.py")


@case("bash-says-segmentation-fault", UNKNOWN)
def shell_segmentation_fault(bench: Workbench) -> None:
    """The same in one process, told by the shell"""
    bench.script("train.py", plain('print("epoch 0")\nimport ctypes\nctypes.string_at(0)'))
    bench.shell("python train.py --epochs 10")


@case("deepspeed-return-code-minus-6-without-a-word", UNKNOWN)
def aborted(bench: Workbench) -> None:
    """abort() on both ranks, without a message"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine(step="if step == 5:\n    os.abort()"))
    bench.deepspeed("train.py", "--deepspeed", "--deepspeed_config", "ds_config.json")


@case("too-many-open-files-in-the-data-set", MACHINE)
def descriptors(bench: Workbench) -> None:
    """RLIMIT_NOFILE is reached by a data set that keeps its files open"""
    body = """
    class Shards(Dataset):
        def __init__(self):
            self.files = []

        def __len__(self):
            return 4096

        def __getitem__(self, index):
            self.files.append(open(f"shard_{index:05d}.bin", "w"))
            return torch.zeros(4)

    for step, rows in enumerate(DataLoader(Shards(), batch_size=32)):
        print(f"step {step}", flush=True)
    """
    bench.script("train_webdataset.py", plain(body))
    bench.run("bash", "-c", "ulimit -n 256; python train_webdataset.py")


@case("dataloader-received-zero-items-of-ancdata", MACHINE)
def ancillary_data(bench: Workbench) -> None:
    """Tensors kept from workers' batches use up the descriptors"""
    body = """
    class Rows(Dataset):
        def __len__(self):
            return 100000

        def __getitem__(self, index):
            return torch.zeros(16)

    kept = []
    for step, rows in enumerate(DataLoader(Rows(), batch_size=4, num_workers=1)):
        kept.append(rows)
        if step % 20 == 0:
            print(f"step {step}", flush=True)
    """
    bench.script("collect_features.py", plain(body))
    bench.run("bash", "-c", "ulimit -n 200; python collect_features.py")


@case("output-directory-permission-denied", MACHINE)
def permission(bench: Workbench) -> None:
    """Somebody who is not root writes a checkpoint where only root may"""
    body = """
    os.setgroups([])
    os.setuid(65534)
    print("epoch 0 loss 2.31")
    torch.save(nn.Linear(4, 4).state_dict(), "checkpoints/epoch_0.pt")
    """
    (bench.project / "checkpoints").mkdir(mode=0o700)
    bench.root.chmod(0o755)
    bench.script("train.py", plain(body))
    bench.python("train.py")


@case("output-directory-read-only-file-system", MACHINE)
def read_only(bench: Workbench) -> None:
    """The results' folder is mounted read-only"""
    body = """
    for epoch in range(3):
        print(f"epoch {epoch} loss {2.3 - epoch / 10:.2f}", flush=True)
    os.makedirs("results/run_1")
    """
    bench.script("train.py", plain(body))
    results = bench.project / "results"
    command = f"mkdir {results} && mount -t tmpfs -o ro,size=1m tmpfs {results} && exec python train.py"
    bench.run("unshare", "-m", "bash", "-c", command)


@case("cgroup-pids-limit-resource-unavailable", MACHINE)
def process_limit(bench: Workbench) -> None:
    """The container's limit of processes stops DataLoader's workers: Errno 11"""
    body = """
    import resource
    os.setgroups([])
    resource.setrlimit(resource.RLIMIT_NPROC, (3, 3))
    os.setuid(64123)
    data = torch.utils.data.TensorDataset(torch.zeros(100, 4))
    for (rows,) in DataLoader(data, batch_size=4, num_workers=8):
        print(rows.shape)
    """
    bench.root.chmod(0o755)
    bench.script("train.py", plain(body))
    bench.python("train.py")
