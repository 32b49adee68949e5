"""A disk that is full, or fills up, is named with its folder, and a fit goes on once there is room."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from tests.support.bad_workloads import FILLING, TALKING
from tests.support.hostile import Case

FIT = "fit model.py --gpus 2 --device cpu --gpu-memory 1GiB --config quick --quiet --out disk/out"


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def full(text: str, *options: str) -> Case:
    line = " ".join((FIT, *options))
    return Case(line, 3, "disk/out: the disk is full", "ranks", {"model.py": text}, leaves=("disk",), seconds=400)


def test_a_full_disk_is_named(meet, disk):
    with contextlib.suppress(OSError), open(disk / "filler", "wb") as file:
        file.write(bytes(2**23))
    meet(full(TALKING))


def test_a_fit_goes_on_after_a_disk_filled_up_in_a_trial(meet, disk):
    filler = disk / "filler"
    text = FILLING.replace("FILLER", str(filler))
    meet(full(text))
    filler.unlink()
    filler.symlink_to("/dev/full")
    meet(Case(FIT, 0, "", "ranks", {"model.py": text}, leaves=("disk",), seconds=400))


@pytest.mark.parametrize("free_bytes", [2**20 + 2**14, 2**20 + 2**17])
def test_a_disk_that_fills_up_between_trials_is_named(meet, disk, free_bytes):
    stat = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(stat.f_bavail * stat.f_frsize - free_bytes))
    meet(full(TALKING, "--ladder zero1"))
