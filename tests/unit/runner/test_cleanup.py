"""What is left of a fit: its marked processes are ended and its files removed, whoever was killed; nothing else is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autods.errors import EnvironmentBroken
from autods.runner import cleanup
from autods.runner.cleanup import VARIABLE, end_session, find_processes, note_job, open_session, remove_leftovers
from autods.system import processes
from tests.support.watching import is_running

Started = Callable[..., subprocess.Popen[bytes]]
NOBODY = 65534


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test alone for private folders, so that no other fit is met, nor a session of this process."""
    monkeypatch.setattr(cleanup, "ROOT", tmp_path)
    monkeypatch.setattr(cleanup, "_opened", {})
    return tmp_path


@pytest.fixture
def start() -> Iterator[Started]:
    """Starts a process in a session of its own, which carries the folder; it is gone when the test is over."""
    with contextlib.ExitStack() as stack:

        def start(folder: Path | None, *command: str) -> subprocess.Popen[bytes]:
            mark = {} if folder is None else {VARIABLE: str(folder)}
            process = subprocess.Popen(
                command or ("sleep", "600"), env={**os.environ, **mark}, start_new_session=True, stdout=subprocess.PIPE
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def wait_for(holds: Callable[[], object], limit_s: float = 30) -> None:
    until = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def folders(root: Path) -> list[str]:
    return [path.name for path in root.glob(f"{cleanup.PREFIX}*")]


def run_driver(root: Path, *lines: str) -> subprocess.Popen[str]:
    """A process that opens a session in `root`, starts a process that carries it, prints its pid, and goes on."""
    code = [
        "import os, subprocess, sys, time",
        "from pathlib import Path",
        "from autods.runner import cleanup",
        f"cleanup.ROOT, cleanup.GRACE_S = Path({str(root)!r}), 0.0",
        "with cleanup.open_session() as folder:",
        "    marked = {**os.environ, **cleanup.session_variables()}",
        "    sleep = subprocess.Popen(['sleep', '600'], env=marked, start_new_session=True)",
        "    print(sleep.pid, flush=True)",
        *(f"    {line}" for line in lines),
    ]
    return subprocess.Popen([sys.executable, "-c", "\n".join(code)], stdout=subprocess.PIPE, text=True)


def guards(root: Path) -> list[int]:
    """The pids of the guards whose folder is in `root`."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if any(word.startswith(os.fsencode(root)) for word in words) and b"cleanup.main" in b" ".join(words):
                pids.append(int(entry.parts[2]))
    return pids


def test_all_that_carry_the_folder_end_and_no_others(root: Path, start: Started) -> None:
    mine, neighbour, other = start(root / "mine"), start(root / "mine.too"), start(None)
    assert find_processes(root / "mine") == [mine.pid]
    end_session(root / "mine", grace_s=0)
    assert mine.wait(30) == -signal.SIGKILL
    assert (neighbour.poll(), other.poll()) == (None, None)


def test_a_stopped_process_goes_on_and_ends_by_itself(root: Path, start: Started) -> None:
    stopped = start(root / "mine", "sh", "-c", "kill -STOP $$; echo removed its files")
    wait_for(lambda: processes.is_stopped(stopped.pid))
    end_session(root / "mine", grace_s=20)
    assert stopped.stdout is not None
    assert stopped.stdout.read() == b"removed its files\n"


def test_a_stopped_process_that_does_not_end_is_killed(root: Path, start: Started) -> None:
    stopped = start(root / "mine", "sh", "-c", "while :; do kill -STOP $$; done")
    wait_for(lambda: processes.is_stopped(stopped.pid))
    end_session(root / "mine", grace_s=0.2)
    assert stopped.wait(30) == -signal.SIGKILL


def test_a_session_that_ends_well_leaves_nothing(root: Path) -> None:
    with open_session() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        wait_for(lambda: len(guards(root)) == 1)  # an exec that has begun shows no words for a moment
    assert (folders(root), guards(root), cleanup.present_folder()) == ([], [], None)


def test_a_session_inside_another_is_the_same(root: Path) -> None:
    with open_session() as folder, open_session() as inner:
        wait_for(lambda: guards(root))
        assert (inner, len(guards(root))) == (folder, 1)
    assert folders(root) == []


def test_threads_share_a_session_until_the_last_one_leaves(root: Path, start: Started) -> None:
    """Two calls of the Python API at a time: the first to return must not end what the other one started."""
    entered, first_may_leave = threading.Barrier(3), threading.Event()
    seen: list[Path] = []

    def work(meanwhile: Callable[[Path], object]) -> None:
        entered.wait(30)
        with open_session() as folder:
            seen.append(folder)
            entered.wait(30)
            meanwhile(folder)

    def outlast_the_first(folder: Path) -> None:
        first.join(30)
        assert start(folder).poll() is None
        assert folder.exists()
        seen.append(folder)

    first = threading.Thread(target=work, args=(lambda folder: first_may_leave.wait(30),))
    last = threading.Thread(target=work, args=(outlast_the_first,))
    first.start()
    last.start()
    entered.wait(30)  # both begin at once
    entered.wait(30)
    first_may_leave.set()
    last.join(60)
    assert (len(seen), len(set(seen))) == (3, 1)
    assert (folders(root), guards(root), cleanup.present_folder()) == ([], [], None)


def test_after_a_killed_driver_nothing_is_left(root: Path) -> None:
    driver = run_driver(root, "time.sleep(600)")
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.communicate()
    wait_for(lambda: not (folders(root) or guards(root) or is_running(pid)))


def test_a_process_that_leaves_a_session_without_its_end_is_dead(root: Path) -> None:
    driver = run_driver(root, "os._exit(0)")
    driver.communicate(timeout=30)
    wait_for(lambda: not (folders(root) or guards(root)))


def test_a_child_that_holds_the_pipe_hides_no_death(root: Path, start: Started) -> None:
    driver = run_driver(root, "if os.fork() == 0: time.sleep(600)", "time.sleep(600)")
    assert driver.stdout is not None
    driver.stdout.readline()
    wait_for(lambda: Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().count(" ") == 3)
    children = map(int, Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split())
    driver.kill()
    try:
        wait_for(lambda: not guards(root))
        assert folders(root) == []
    finally:
        for pid in children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        driver.communicate()


def test_a_fork_that_leaves_a_session_does_not_end_it(root: Path) -> None:
    pid = 0
    try:
        with open_session() as folder:
            pid = os.fork()
            if pid:
                assert os.waitpid(pid, 0)[1] == 0
                assert folder.exists()
                wait_for(lambda: len(guards(root)) == 1)
    finally:
        if not pid:
            os._exit(0)
    assert folders(root) == []


def test_a_guard_that_was_killed_is_made_up_for(root: Path, start: Started) -> None:
    with open_session() as folder:
        left = start(folder)
        wait_for(lambda: guards(root))
        os.kill(*guards(root), signal.SIGKILL)
    assert left.wait(30) == -signal.SIGKILL
    assert folders(root) == []


def test_the_next_session_removes_what_was_abandoned(root: Path, start: Started) -> None:
    """Its driver and its guard were killed together; those of the other one live."""
    dead, lock = cleanup.make_session_folder()
    os.close(lock)
    live, lock = cleanup.make_session_folder()
    left, kept = start(dead), start(live)
    with open_session():
        assert left.wait(30) == -signal.SIGKILL
        assert (dead.exists(), live.exists(), kept.poll()) == (False, True, None)
    os.close(lock)


@pytest.mark.parametrize("trap", ["a link", "open to others", pytest.param("of another user", id="another-user")])
def test_a_folder_that_is_not_ours_is_left_alone(root: Path, trap: str) -> None:
    planted, victim = root / f"{cleanup.PREFIX}1-aaaaaaaa", root / "victim"
    if trap == "a link":
        victim.mkdir(mode=0o700)
        planted.symlink_to(victim)
    else:
        planted.mkdir(mode=0o700)
        planted.chmod(0o777 if trap == "open to others" else 0o700)
    (planted / "private").write_text("precious")
    if trap == "of another user":
        if os.getuid() != 0:
            pytest.skip("only root can make another user's folder")
        os.chown(planted, NOBODY, NOBODY)
    cleanup.remove_abandoned()
    assert (planted / "private").read_text() == "precious"


def test_a_new_folder_without_a_lock_is_left_a_minute(root: Path) -> None:
    new, old = (root / f"{cleanup.PREFIX}{number}-aaaaaaaa" for number in (1, 2))
    for folder in (new, old):
        folder.mkdir(mode=0o700)
    os.utime(old, (0, 0))
    cleanup.remove_abandoned()
    assert (new.exists(), old.exists()) == (True, False)


def test_links_below_an_abandoned_folder_are_not_followed(root: Path) -> None:
    (root / "victim").mkdir()
    (root / "victim" / "private").write_text("precious")
    folder, lock = cleanup.make_session_folder()
    os.close(lock)
    (folder / "r").symlink_to(root / "victim")
    (folder / "jobs" / "1").symlink_to(root / "victim" / "private")
    cleanup.remove_abandoned()
    assert not folder.exists()
    assert (root / "victim" / "private").read_text() == "precious"


def test_leftovers_of_dead_ranks_are_removed(root: Path, monkeypatch: pytest.MonkeyPatch, start: Started) -> None:
    folder, lock = cleanup.make_session_folder()
    monkeypatch.setenv(VARIABLE, str(folder))
    dead, live = start(None, "true"), start(None)
    dead.wait()
    files = {pid: Path(f"/dev/shm/torch_{pid}_1_1") for pid in (dead.pid, live.pid)}
    (root / "swap").mkdir()
    (root / "swap" / "tensor").write_text("large")
    try:
        for file in files.values():
            file.touch()
        note = note_job(files, [str(root / "swap")], frozenset())
        assert note is not None
        remove_leftovers(note)
        assert [files[pid].exists() for pid in (dead.pid, live.pid)] == [False, True]
        assert not (root / "swap").exists()
        assert not note.exists()
    finally:
        os.close(lock)
        for file in files.values():
            file.unlink(missing_ok=True)


def test_shared_memory_from_before_a_job_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch, start: Started) -> None:
    folder, lock = cleanup.make_session_folder()
    monkeypatch.setenv(VARIABLE, str(folder))
    dead = start(None, "true")
    dead.wait()
    file = Path(f"/dev/shm/torch_{dead.pid}_1_1")
    file.touch()
    try:
        remove_leftovers(note_job([dead.pid], [], frozenset({file.name})))
        assert file.exists()
    finally:
        os.close(lock)
        file.unlink()


@pytest.mark.parametrize("note", ["", "[]", "{", json.dumps({"pids": ["x"], "folders": [], "shared": []})])
def test_a_note_that_was_not_finished_is_removed(root: Path, note: str) -> None:
    (root / "1").write_text(note)
    remove_leftovers(root / "1")
    assert not (root / "1").exists()


def test_without_a_session_nothing_is_noted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", str(root / "elsewhere")):
        monkeypatch.setenv(VARIABLE, value)
        assert note_job([1], [], frozenset()) is None


def test_a_root_that_takes_no_folder_breaks_the_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "ROOT", root / "missing")
    with pytest.raises(EnvironmentBroken, match="no folder can be made there"), open_session():
        pass


def test_a_guard_that_cannot_start_leaves_no_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(EnvironmentBroken, match="a process cannot be started"), open_session():
        pass
    assert folders(root) == []
