"""Runs that finish, or are still going: their logs may well speak of errors and of memory."""

from __future__ import annotations

import signal

from tests.corpus.provoke.cases import HEALTHY, case
from tests.corpus.provoke.scripts import ddp, engine, plain, trainer, zero
from tests.corpus.provoke.workbench import Workbench


@case("deepspeed-zero2-finishes", HEALTHY)
def deepspeed(bench: Workbench) -> None:
    """The deepspeed launcher, ZeRO-2, to the end"""
    bench.json("ds_config.json", **zero(2, wall_clock_breakdown=True))
    bench.script("pretrain.py", engine())
    bench.deepspeed("pretrain.py", "--deepspeed", "--deepspeed_config", "ds_config.json")


@case("deepspeed-zero3-dumps-its-configuration-and-finishes", HEALTHY)
def deepspeed_verbose(bench: Workbench) -> None:
    """ZeRO-3 with the whole configuration in the log"""
    bench.json("ds_config.json", **zero(3, dump_state=True, memory_breakdown=True))
    bench.script("pretrain.py", engine())
    bench.deepspeed("pretrain.py", "--deepspeed", "--deepspeed_config", "ds_config.json", ranks=1)


@case("torchrun-metrics-named-error-rate", HEALTHY)
def error_rates(bench: Workbench) -> None:
    """Metrics with the words error, failed and killed"""
    step = """
    if rank == 0:
        print(f"val: word error rate {0.31 - step / 100:.3f} | failed alignments {step % 3} | OOM bucket skipped 0")
        print(f"[ERROR-ANALYSIS] top-1 error 23.{step}% top-5 error 6.{step}% killed neurons 0.4%")
    """
    bench.script("train_asr.py", ddp(step=step))
    bench.torchrun("train_asr.py")


@case("trainer-progress-bars-to-the-end", HEALTHY)
def progress(bench: Workbench) -> None:
    """Hugging Face's Trainer with its progress bars and warnings"""
    bench.script(
        "run_clm.py", trainer("use_cpu=True,\nlogging_first_step=True,", "import time; time.sleep(0.005)", steps=120)
    )
    bench.python("run_clm.py")


@case("trainer-still-going-in-the-middle-of-a-bar", HEALTHY, tells_exit_code=False)
def still_going(bench: Workbench) -> None:
    """A copy of the log of a Trainer that is still running"""
    bench.script("run_clm.py", trainer("use_cpu=True,", "import time; time.sleep(0.02)", steps=500))
    bench.python("run_clm.py", interrupt=("25/500", signal.SIGKILL))


@case("deepspeed-still-going", HEALTHY, tells_exit_code=False)
def deepspeed_still_going(bench: Workbench) -> None:
    """A copy of the log of a DeepSpeed run that is still running"""
    bench.json("ds_config.json", **zero(1))
    bench.script("train.py", engine(step="time.sleep(0.3)", steps=400))
    bench.deepspeed(
        "train.py",
        "--deepspeed",
        "--deepspeed_config",
        "ds_config.json",
        interrupt=("step=14", signal.SIGKILL),
        group=True,
    )


@case("training-text-speaks-of-cuda-out-of-memory", HEALTHY)
def speaks_of_memory(bench: Workbench) -> None:
    """Samples of a model that is trained on forum posts about CUDA out of memory"""
    body = """
    posts = [
        "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB - how do I fix it?",
        "My DataLoader worker (pid 4242) is killed by signal: Killed. Any idea?",
        "exits with return code = -9, is that the OOM killer?",
    ]
    for step in range(30):
        print(f"step {step:4d} | loss {5.1 - step / 20:.3f} | tok/s 1843")
        if step % 10 == 9:
            print(f"--- sample ---\\nQ: {posts[step // 10]}\\nA: Reduce the batch size or use gradient checkpointing.\\n---")
    print("done, best loss 3.65, model saved to out/final")
    """
    bench.script("train_forum.py", plain(body))
    bench.python("train_forum.py")


@case("torchrun-host-name-does-not-resolve-and-finishes", HEALTHY)
def host_name(bench: Workbench) -> None:
    """gloo cannot resolve the machine's own name, warns, and falls back to the loopback address"""
    bench.script("train.py", ddp())
    command = "hostname worker-7f9c && exec torchrun --nproc-per-node=2 --master-port=29519 train.py"
    bench.run("unshare", "-u", "bash", "-c", command)


@case("restarted-after-a-failure-and-finishes", HEALTHY)
def restarted(bench: Workbench) -> None:
    """torchrun --max-restarts: the first attempt dies of a flaky file, the second finishes"""
    flaky = """
    if rank == 0 and step == 4 and not os.path.exists("seen"):
        open("seen", "w").close()
        raise OSError("[Errno 5] Input/output error: '/mnt/data/shard_00007.bin'")
    """
    bench.script("train.py", ddp(step=flaky))
    bench.torchrun("train.py", options=["--max-restarts=2"])


@case("unraisable-exception-at-exit-after-success", HEALTHY)
def noisy_exit(bench: Workbench) -> None:
    """A finished run with an ignored exception in a __del__ and a warning of leaked objects"""
    body = """
    class Prefetcher:
        def __init__(self):
            self.queue = None

        def __del__(self):
            self.queue.close()

    prefetcher = Prefetcher()
    for epoch in range(3):
        print(f"epoch {epoch} train_loss {1.9 - epoch / 5:.3f} val_loss {2.0 - epoch / 6:.3f}")
    print("Training complete. Best val_loss 1.667 at epoch 2")
    """
    bench.script("train.py", plain(body))
    bench.python("train.py")
