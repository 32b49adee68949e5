"""The documented jobs of Slurm and KubeRay: what their shells make of signals and of words.

Here bash runs their scripts. The programs that these start are small ones of the same names.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.watching import wait_for

DOCS = Path(__file__).parents[2] / "docs"
_NODES = ("one", "several")  # the jobs of slurm.md, in its order
_COMMAND = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
def end(number, frame):
    time.sleep(0.5)
    pathlib.Path("saved").touch()
    sys.exit(128 + number)
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, end)
with open("command.tmp", "w") as file:
    print(*sys.argv[1:], "ready" if os.path.exists(os.environ.get("RAY_TMPDIR", "") + "/ready") else "", file=file)
os.replace("command.tmp", "command")
time.sleep(float(os.environ["SECONDS_LONG"]))
sys.exit(5)
"""
_PROGRAMS: Mapping[str, str] = {
    "autods": _COMMAND,
    "scontrol": '#!/bin/sh\necho "$@" >> asked\n',
    "srun": '#!/bin/sh\nexec "$@"\n',
    "ray": "#!/bin/bash\ngrep SigBlk /proc/self/status > blocked\n"
    'while [ "$1" != -- ]; do shift; done; shift; exec "$@"\n',
}


@contextlib.contextmanager
def job(folder: Path, nodes: str, *, seconds: float = 60.0) -> Iterator[subprocess.Popen[bytes]]:
    """The shell of the job, after its command has begun. The command takes so many seconds and ends with 5."""
    blocks = (DOCS / "slurm.md").read_text().split("```")[1::2]
    script = blocks[_NODES.index(nodes)].lstrip()
    (folder / "job.sh").write_text(script.replace("/tmp/ray-", f"{folder}/ray-"))
    (folder / "bin").mkdir()
    for name, text in _PROGRAMS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SECONDS_LONG": str(seconds)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}
    shell = subprocess.Popen(["bash", "job.sh"], cwd=folder, env=env, start_new_session=True)
    try:
        wait_for((folder / "command").exists, 30)
        yield shell
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


@pytest.mark.parametrize("nodes", _NODES)
def test_a_slurm_job_saves_and_is_requeued_after_usr1(nodes: str, tmp_path: Path) -> None:
    with job(tmp_path, nodes) as shell:
        shell.send_signal(signal.SIGUSR1)
        assert shell.wait(30) == 138
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "asked").read_text() == "requeue 7\n"


@pytest.mark.parametrize("nodes", _NODES)
def test_a_slurm_job_passes_every_sigterm_on(nodes: str, tmp_path: Path) -> None:
    with job(tmp_path, nodes) as shell:
        for _ in range(4):  # scancel, given again and again
            shell.send_signal(signal.SIGTERM)
            time.sleep(0.1)
        assert shell.wait(30) == 143
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("nodes", _NODES)
def test_a_slurm_job_ends_as_its_command_does(nodes: str, tmp_path: Path) -> None:
    with job(tmp_path, nodes, seconds=0.0) as shell:
        assert shell.wait(30) == 5
    assert not (tmp_path / "asked").exists()


def test_ray_of_a_slurm_job_comes_first_and_keeps_sigterm(tmp_path: Path) -> None:
    with job(tmp_path, "several", seconds=0.0) as shell:
        shell.wait(30)
    assert "--address auto" in (tmp_path / "command").read_text()
    assert (tmp_path / "command").read_text().endswith("ready\n")
    blocked = int((tmp_path / "blocked").read_text().split()[1], 16)
    assert blocked >> signal.SIGTERM - 1 & 1


def ray_job() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCS / "kubernetes.md").read_text().split("```yaml\n")[1].split("```")[0]))


def pod_specs() -> tuple[dict[str, Any], dict[str, Any]]:
    """The specs of the head's pod and of a worker's."""
    cluster = ray_job()["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]


def test_the_entrypoint_of_the_ray_job_reaches_its_command(tmp_path: Path) -> None:
    """KubeRay pastes it into a command of its submitter's shell. Ray quotes the words, for another shell."""
    entrypoint = ray_job()["spec"]["entrypoint"].replace("/training", str(tmp_path / "training"))
    (tmp_path / "training").mkdir()
    (tmp_path / "submit").write_text(f"#!{sys.executable}\nimport shlex, sys\nprint(shlex.join(sys.argv[1:]))\n")
    (tmp_path / "autods").write_text('#!/bin/sh\necho "$PWD: $*" > ran\n')
    for name in ("submit", "autods"):
        (tmp_path / name).chmod(0o755)
    pasted = f"if ! false ; then {tmp_path}/submit {entrypoint} ; fi ;"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    submitted = subprocess.run(
        ["bash", "-ce", pasted], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert not (tmp_path / "ran").exists()
    subprocess.run(submitted.stdout, shell=True, cwd=tmp_path, env=env, check=True)
    where, _, words = (tmp_path / "training" / "ran").read_text().strip().partition(": ")
    assert where == str(tmp_path / "training")
    assert words.startswith("run model.py --gpus 8 --nodes 2 --address auto")


def test_the_ray_job_asks_for_the_ranks_of_its_command() -> None:
    job, (_, worker) = ray_job(), pod_specs()
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert f"--gpus {gpus * group['replicas']} --nodes {group['replicas']} " in job["spec"]["entrypoint"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]


@pytest.mark.skipif(shutil.which("pgrep") is None, reason="pgrep is not installed (apt-get install procps)")
@pytest.mark.parametrize("place", ["head", "worker"])
def test_a_pod_ends_after_the_run_has_saved(place: str, tmp_path: Path) -> None:
    """Its hook comes before the SIGTERM of the pod: it asks the command to stop, and waits for it or for the ranks."""
    head, worker = pod_specs()
    spec = head if place == "head" else worker
    hook = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "autods").write_text(_COMMAND)
    words = ["run", "model.py"] if place == "head" else ["-m", "autods.runner.zygote"]
    command = [sys.executable, str(tmp_path / "bin" / "autods"), *words]
    env = {**os.environ, "SECONDS_LONG": "60"}
    ask = "" if place == "head" else "(sleep 1; kill $!) & "
    script = f'{shlex.join(command)} &\nwhile [ ! -e command ]; do sleep 0.05; done\n{ask}"$@"\nls saved\n'
    (tmp_path / "pod.sh").write_text(script)
    # In a namespace of its own: other processes of this machine may have such names, too.
    pod = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "pod.sh"]
    done = subprocess.run([*pod, *hook], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("saved\n"), done.stderr
    assert spec["terminationGracePeriodSeconds"] > int(head["containers"][0]["env"][0]["value"])
