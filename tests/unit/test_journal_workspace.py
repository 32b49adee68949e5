"""The folder of a fit: held by one fit at a time, and nothing in it that somebody else wrote is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autods.errors import InputError
from autods.journal import JOURNAL, Journal, workspace

USERS = ["ds_config.json", "report.json", "accelerate.yaml", "logs/train.log", "journal.jsonl", "study.jsonl"]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", USERS)
def test_what_no_fit_wrote_is_never_written_over(tmp_path: Path, name: str, fresh: bool) -> None:
    (tmp_path / ".lock").touch()  # of another program
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("mine")
    with pytest.raises(InputError, match=f"holds {name} and no journal of a fit"), workspace(tmp_path, fresh=fresh):
        pass
    assert own.read_text() == "mine"


def test_a_folder_with_other_files_is_used(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("")
    with workspace(tmp_path, fresh=True) as out:
        assert out == tmp_path
    assert (tmp_path / "model.py").exists()


def test_the_traceback_of_a_fit_that_failed_early_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "internal-error.txt").write_text("")
    with workspace(tmp_path, fresh=False):
        pass


def test_fresh_removes_all_that_an_earlier_fit_left(tmp_path: Path) -> None:
    left = ["report.json", "ds_config_hf.json", "ds_config_lightning.json", "accelerate.yaml", "study.jsonl"]
    Journal(tmp_path / JOURNAL).open(fingerprint="")
    (tmp_path / "logs").mkdir()
    for name in (*left, "logs/rank0.log"):
        (tmp_path / name).write_text("")
    with workspace(tmp_path, fresh=True):
        assert [path.name for path in tmp_path.iterdir()] == [".autods.lock"]


def test_two_fits_in_one_folder_are_refused(tmp_path: Path) -> None:
    with (
        workspace(tmp_path, fresh=False),
        pytest.raises(InputError, match="another fit is running"),
        workspace(tmp_path, fresh=False),
    ):
        pass


def test_a_fit_killed_before_its_journal_starts_again(tmp_path: Path) -> None:
    with workspace(tmp_path, fresh=False):
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "zygote.log").touch()
    with workspace(tmp_path, fresh=False) as out:
        assert out == tmp_path


def test_a_lock_holds_beyond_a_container_and_ends_with_its_holder(tmp_path: Path) -> None:
    """The holder has, as root, pids of its own: the number of its pid says nothing here."""
    hold = (
        "import sys, time\nfrom pathlib import Path\nfrom autods.journal import workspace\n"
        "with workspace(Path(sys.argv[1]), fresh=False):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode == 0:
        command = [*apart, *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(InputError, match="another fit is running"), workspace(tmp_path, fresh=False):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            holder.stdout.read()  # ends when the holder itself has
    with workspace(tmp_path, fresh=False) as out:
        assert out == tmp_path


@pytest.mark.parametrize("name", [JOURNAL, ".autods.lock"])
def test_a_pipe_in_the_folder_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError), workspace(tmp_path, fresh=False) as out:
        Journal(out / JOURNAL).open(fingerprint="")


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null", "gone", "."])
def test_a_journal_that_is_a_link_elsewhere_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / JOURNAL).symlink_to(target)
    (tmp_path / ".autods.lock").touch()
    with pytest.raises(InputError), workspace(tmp_path, fresh=False) as out:
        Journal(out / JOURNAL).open(fingerprint="")


def test_a_journal_of_10_gib_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path / JOURNAL).open(fingerprint="")
    os.truncate(tmp_path / JOURNAL, 10 * 2**30)
    with pytest.raises(InputError, match=r"at most 1.0 GiB are read"), workspace(tmp_path, fresh=False) as out:
        Journal(out / JOURNAL).open(fingerprint="")


@pytest.mark.parametrize("place", ["/proc/x", "/proc/self/fd/x", "file/x", "link", "loop/x"])
def test_a_place_that_holds_no_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("gone/further")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError), workspace(tmp_path / place, fresh=False):
        pass
