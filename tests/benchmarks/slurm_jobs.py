"""The documented jobs of Slurm, submitted to a Slurm of two nodes on this machine: do they save, and go on?

python tests/benchmarks/slurm_jobs.py [one] [several] [--track cgroup|linuxproc]. Needs root, and Slurm (Debian:
apt-get install slurmctld slurmd slurm-client munge).

The nodes are namespaces with addresses, names, processes and a /tmp of their own. Each job gets the signal of its time
limit in mid-training, is requeued, gets `scancel` in its second life, and is submitted again, to its last step. A row
shows the seconds from a signal until Slurm has ended the job, and the saved step. At last every step has to have its
own samples. Exit code 1 when a job breaks a claim.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from autods.rank.training_run.checkpoints import list_checkpoints
from tests.benchmarks.run_faults import read_attempts
from tests.benchmarks.workloads.slow_steps import SAMPLES
from tests.support.namespaces import HEAD, Lab, in_new_namespace, why_no_namespaces
from tests.support.watching import wait_for

ROOT = Path(__file__).parents[2]
STEPS, GLOBAL_BATCH, LONG_S = 144, 8, 900
JOBS = ["one", "several"]  # nodes, in the order of docs/slurm.md
RUN = "--device cpu --gpus 2 --gpu-memory 1GiB --ladder zero2 --no-forecast --config quick --checkpoint-every 1000"
CONFIG = """
ClusterName=lab
SlurmctldHost=node1({network}1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=15
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/{track}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=node1 NodeAddr={network}1 CPUs=4
NodeName=node2 NodeAddr={network}2 CPUs=4
PartitionName=all Nodes=node[1-2] Default=YES
"""
NODE = """
number=$1 folder=$2
hostname node$number
mount --bind $folder/hosts /etc/hosts; mount -t tmpfs none /dev/shm; mount -t tmpfs none /mnt
for path in $folder $3; do mkdir -p /mnt/$path; mount --bind $path /mnt/$path; done
chmod 1777 /mnt/tmp; mount --rbind /mnt/tmp /tmp
if [ $number = 1 ]; then
    files="--key-file=$folder/munge.key --pid-file=$folder/munge.pid --seed-file=$folder/munge.seed"
    munged --force --socket=$folder/munge.socket --log-file=$folder/munge.log $files
    slurmctld -D -c -f $folder/slurm.conf &
fi
slurmd -D -N node$number -f $folder/slurm.conf &
while :; do wait; sleep 1; done  # the first process of its namespace has orphans to wait for
"""


class SlurmLab(Lab):
    """The nodes run Slurm instead of Ray."""

    def __init__(self, track: str) -> None:
        super().__init__(2, cpus=4)
        config = CONFIG.format(folder=self.folder, network=self.network, track=track)
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        hosts = [f"{self.node_address(number)} node{number}" for number in self.nodes]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)

    def _start(self, number: int) -> None:
        (self.folder / f"spool.node{number}").mkdir()
        spaces = ["--uts", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "--propagation", "private"]
        place = ["nsenter", f"--net=/run/netns/n{number}", "unshare", *spaces]  # `ip netns exec` would hide /sys
        with open(self.folder / f"n{number}.txt", "wb") as said:
            command = [*place, "bash", "-c", NODE, "node", str(number), str(self.folder), str(ROOT)]
            self.rays.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said))

    def _wait(self) -> None:
        wait_for(lambda: self.call("sinfo", "--noheader", "-o", "%D %t", check=False) == "2 idle", 60)

    def call(self, *command: str, folder: Path | None = None, check: bool = True) -> str:
        """What a command of Slurm prints, on the first node."""
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": programs, "HOME": str(self.folder), "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        env["SLURM_CONF"] = str(self.folder / "slurm.conf")
        done = subprocess.run(
            [*self.at(HEAD), *command], cwd=folder, env=env, capture_output=True, text=True, check=check
        )
        return done.stdout.strip()


def read_job(nodes: str) -> str:
    """The job of docs/slurm.md for one node or several, with the small run of this benchmark."""
    blocks = (ROOT / "docs" / "slurm.md").read_text().split("```")[1::2]
    job = blocks[JOBS.index(nodes)].lstrip()
    job = re.sub(r"--gpus-per-node=\d", "", job).replace("--time=24:00:00", "--time=60")
    cluster = "--nodes 2 --address auto " if "--nodes 2 " in job else ""
    size = f"--global-batch {GLOBAL_BATCH} --steps {STEPS} --out run"
    return re.sub(r"autods run .* &\n", f"autods run slow_steps.py {RUN} {cluster}{size} &\n", job)


def try_job(lab: SlurmLab, nodes: str) -> bool:
    """Submit, interrupt and finish the job of so many nodes; return whether it held its claims."""
    folder = lab.folder / nodes
    folder.mkdir()
    shutil.copy(ROOT / "tests/benchmarks/workloads/slow_steps.py", folder)
    (folder / "job.sh").write_text(read_job(nodes))
    out = folder / "run"
    saved = interrupt(
        lab, out, job := submit(lab, folder), ["--signal=USR1", "--batch"], lambda: restarts(lab, job) > 0
    )
    again = interrupt(lab, out, job, [], lambda: state(lab, job) == "CANCELLED")
    job = submit(lab, folder)
    wait_for(lambda: state(lab, job) in ("COMPLETED", "FAILED", "NODE_FAIL"), LONG_S)
    attempts = [attempt for attempt in read_attempts(out) if attempt.lines]
    seen = {step: attempt.seen[step] for attempt in attempts for step in attempt.lines}
    order = [sample for step in sorted(seen) for sample in seen[step]]
    epochs = [sorted(order[first : first + SAMPLES]) for first in range(0, len(order), SAMPLES)]
    once = sum(len(attempt.lines) for attempt in attempts) == len(seen) == STEPS
    same = all(epoch == list(range(SAMPLES)) for epoch in epochs)
    print(f"{nodes}: {state(lab, job)}, each step once: {once}, each sample once an epoch: {same}", flush=True)
    good = 0 < saved < again and state(lab, job) == "COMPLETED" and once and same
    if not good:
        print("\n".join(file.read_text(errors="replace")[-3000:] for file in folder.glob("slurm-*.out")))
    return good


def submit(lab: SlurmLab, folder: Path) -> str:
    return lab.call("sbatch", "--parsable", "job.sh", folder=folder)


def interrupt(lab: SlurmLab, out: Path, job: str, how: list[str], ended: Callable[[], bool]) -> int:
    """Signal the job when it has trained a while since its last checkpoint; return the step that it then saves."""
    before = saved_step(out)
    wait_for(lambda: (attempts := read_attempts(out)) and attempts[-1].last_step > before + 20, LONG_S)
    began = time.monotonic()
    lab.call("scancel", *how, job)
    wait_for(ended, 120)
    words = " ".join(["scancel", *how])
    print(
        f"{out.parent.name}: {words}: ended after {time.monotonic() - began:.1f} s, saved {saved_step(out)}", flush=True
    )
    return saved_step(out) if saved_step(out) > before else 0


def saved_step(out: Path) -> int:
    latest = list_checkpoints(out / "checkpoints").latest
    return 0 if latest is None else latest.step


def state(lab: SlurmLab, job: str) -> str:
    return read_field(lab, job, "JobState")


def restarts(lab: SlurmLab, job: str) -> int:
    return int(read_field(lab, job, "Restarts"))


def read_field(lab: SlurmLab, job: str, name: str) -> str:
    return re.findall(rf"\b{name}=(\w+)", lab.call("scontrol", "show", "job", job))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=JOBS)
    parser.add_argument("--track", choices=["cgroup", "linuxproc"], default="cgroup")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if why := (f"{', '.join(missing)} not found" if missing else None) or why_no_namespaces():
        print(why)
        return 2
    if not asked.inside:
        return subprocess.run(in_new_namespace([sys.executable, __file__, "--inside", *sys.argv[1:]])).returncode
    with SlurmLab(asked.track) as lab:
        bad = [nodes for nodes in asked.jobs if not try_job(lab, nodes)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
