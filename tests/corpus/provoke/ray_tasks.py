"""Ray: its memory monitor, and what its tasks and actors say of other people's errors."""

from __future__ import annotations

import textwrap

from tests.corpus.provoke.cases import HOST, UNKNOWN, USER_CODE, case
from tests.corpus.provoke.workbench import Workbench

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}


def _ray(bench: Workbench, body: str, **env: str) -> None:
    text = textwrap.dedent(
        """
        import os
        import time

        import ray

        ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=200 << 20)


        """
    )
    bench.script("tune.py", text + textwrap.dedent(body).lstrip("\n"))
    temporary = bench.root / "r"
    bench.python("tune.py", env=QUIET | {"RAY_TMPDIR": str(temporary)} | env)


HOARD = """
@ray.remote(max_retries=0)
def trial(config):
    import numpy as np
    rows = []
    for epoch in range(2000):
        rows.append(np.ones(1 << 20))
        if epoch % 50 == 0:
            print(f"trial lr={config['lr']} epoch {epoch}", flush=True)
        time.sleep(0.01)
    return len(rows)


print(ray.get(trial.remote({"lr": 0.1})))
"""


@case("ray-memory-monitor-kills-a-task", HOST)
def monitor(bench: Workbench) -> None:
    """Ray's memory monitor, with a low threshold, kills a task that hoards"""
    _ray(bench, HOARD, RAY_memory_usage_threshold="0.18", RAY_memory_monitor_refresh_ms="100")


@case("ray-task-memory-error", HOST)
def task_memory_error(bench: Workbench) -> None:
    """numpy's memory error inside a Ray task"""
    body = """
    @ray.remote(max_retries=0)
    def preprocess(rows):
        import numpy as np
        import resource
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        return np.ones((rows, 4096)).sum()


    print(ray.get(preprocess.remote(10_000_000)))
    """
    _ray(bench, body)


@case("ray-actor-died-unexpectedly", UNKNOWN)
def actor_died(bench: Workbench) -> None:
    """An actor's process is killed by hand: ActorDiedError"""
    body = """
    @ray.remote
    class Trainer:
        def step(self, number):
            if number == 3:
                os.kill(os.getpid(), 9)
            return number


    trainer = Trainer.remote()
    for number in range(6):
        print(f"step {ray.get(trainer.step.remote(number))} done")
    """
    _ray(bench, body)


@case("ray-task-key-error", USER_CODE)
def task_key_error(bench: Workbench) -> None:
    """KeyError in a Ray task"""
    body = """
    @ray.remote
    def trial(config):
        return config["learning_rate"] * 2


    print(ray.get([trial.remote({"lr": 0.1}), trial.remote({"lr": 0.2})]))
    """
    _ray(bench, body)
