"""A process that is busy ends with the peer that it works for, and only its own files in shared memory go with it."""

import contextlib
import faulthandler
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autods.system import processes

WORKER = """
import socket, sys, time
from autods.system import processes as procs

peer = socket.socket(fileno=int(sys.argv[1]))
with procs.die_with_peer(peer):
    peer.sendall(b"busy")
    time.sleep(0 if "quick" in sys.argv else 60)
peer.sendall(b"done")
time.sleep(0.3)
sys.exit(5)
"""


def worker(theirs: socket.socket, *words: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WORKER, str(theirs.fileno()), *words]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return process


def test_a_busy_process_dies_when_its_peer_hangs_up() -> None:
    ours, theirs = socket.socketpair()
    process = worker(theirs)
    assert ours.recv(4) == b"busy"
    ours.close()
    assert process.wait(30) < 0  # by a signal


def test_a_peer_that_hung_up_before_is_noticed_too() -> None:
    ours, theirs = socket.socketpair()
    ours.close()
    assert worker(theirs).wait(30) == 97


def test_a_process_that_has_done_its_work_outlives_its_peer() -> None:
    ours, theirs = socket.socketpair()
    process = worker(theirs, "quick")
    assert ours.recv(8, socket.MSG_WAITALL) == b"busydone"
    ours.close()
    assert process.wait(30) == 5


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_childs_end_is_seen_with_and_without_pidfd(monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    if not pidfd:
        monkeypatch.setattr(processes, "has_pidfd", lambda: False)
    waits, goes = os.pipe()
    pid, ending, kept = processes.fork_watched()
    if pid == 0:
        os.close(goes)
        os.read(waits, 1)  # until the parent lets go
        os._exit(0)
    assert kept == -1
    poll = select.poll()
    poll.register(ending, select.POLLIN)
    assert poll.poll(0) == []
    os.close(goes)
    assert [fd for fd, _ in poll.poll()] == [ending]
    assert os.waitpid(pid, 0)[1] == 0
    os.close(ending)
    os.close(waits)


def until(holds: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < 20
        time.sleep(0.001)


def test_a_signal_is_being_taken_until_its_handler_has_ended() -> None:
    """The stack is written into a pipe that is full: the handler waits for the reader."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    (ready, tells), (waits, goes) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(goes)
        faulthandler.register(signal.SIGUSR1, file=writer)
        os.write(tells, b"!")
        os.read(waits, 1)  # until the parent lets go
        os._exit(0)
    os.read(ready, 1)
    assert not processes.is_handling_signal(pid, signal.SIGUSR1)
    os.kill(pid, signal.SIGUSR1)
    until(lambda: processes.is_handling_signal(pid, signal.SIGUSR1))  # neither pending nor blocked on its way in
    os.read(reader, 2**20)
    until(lambda: not processes.is_handling_signal(pid, signal.SIGUSR1))
    os.close(goes)
    assert os.waitpid(pid, 0)[1] == 0
    assert not processes.is_handling_signal(pid, signal.SIGUSR1)
    for fd in (reader, writer, ready, tells, waits):
        os.close(fd)


def test_a_rank_is_taken_by_the_oom_killer_before_what_watches_it() -> None:
    """Ray's workers have the worst score there is: a rank has to have it, too, for then the larger one goes."""
    code = (
        "from autods.system.processes import prefer_for_oom_kill; prefer_for_oom_kill(); "
        "print(open('/proc/self/oom_score_adj').read())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(said) == 1000


@pytest.fixture
def shared() -> Iterator[Callable[[str], Path]]:
    """Makes files in /dev/shm, as other programs would."""
    made: list[Path] = []

    def make(name: str) -> Path:
        made.append(Path("/dev/shm") / name)
        made[-1].touch()
        return made[-1]

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_only_files_that_a_rank_made_leave_shared_memory(shared: Callable[[str], Path]) -> None:
    pid, mark = 4_190_001, os.getpid()  # above the largest pid that Linux gives
    earlier = shared(f"torch_{pid}_{mark}_0")
    before = processes.list_shared_memory()
    ranks = [shared(f"torch_{pid}_{mark}_1"), shared(f"__KMP_REGISTERED_LIB_{pid}_{os.getuid()}")]
    users = [shared(name) for name in (f"replay-{pid}-{mark}.bin", f"dataset_{pid}", f"torch_{pid}1_{mark}_0")]
    processes.unlink_shared_memory([pid], before)
    assert [path.exists() for path in ranks] == [False, False]
    assert all(path.exists() for path in (earlier, *users))


def test_a_child_that_sigkill_does_not_end_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in state D waits for a device, and no signal reaches it."""
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        monkeypatch.setattr(processes, "list_children", lambda: [child.pid])
        with monkeypatch.context() as patched:
            patched.setattr(os, "kill", lambda pid, number: None)
            assert processes.kill_children(0.05) == [child.pid]
        assert processes.describe_process(child.pid).startswith(f"process {child.pid} (sleep) in state S (sleeping)")
        child.kill()


def test_shared_memory_of_a_killed_process_is_found_by_its_pid() -> None:
    """Python's helper, which would remove it, is killed as well."""
    code = (
        "import multiprocessing, os, signal\n"
        "from multiprocessing import resource_tracker\n"
        "from multiprocessing.shared_memory import SharedMemory\n"
        "from autods.system.processes import put_pid_into_names\n"
        "put_pid_into_names()\n"
        "kept = SharedMemory(create=True, size=64), multiprocessing.get_context('spawn').Semaphore()\n"
        "os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = processes.list_shared_memory()
    process = subprocess.Popen([sys.executable, "-c", code])
    process.wait()
    left = processes.shared_of([process.pid], processes.list_shared_memory() - before)
    processes.unlink_shared_memory([process.pid], before)
    assert sorted(name.partition(str(process.pid))[0] for name in left) == ["psm_", "sem.mp-"]
    assert not left & processes.list_shared_memory()


def read_whole(log: Path) -> str:
    return "".join(file.read_text() for file in (*processes.find_log_parts(log), log))


def test_a_long_log_is_moved_into_parts_and_stays_whole(tmp_path: Path) -> None:
    log, written = tmp_path / "rank0.log", ""
    with open(log, "a") as rank:
        for number in range(400):
            written += f"step {number}\n"
            rank.write(f"step {number}\n")
            rank.flush()
            processes.split_log(log, last_parts=6, most=800, end=100)
            assert log.stat().st_size <= 800
    assert len(processes.find_log_parts(log)) > 3
    assert read_whole(log) == written
    assert log.read_text().endswith("step 399\n")


@pytest.mark.parametrize("last_parts", [0, 2])
def test_a_log_without_end_says_what_is_left_out(tmp_path: Path, last_parts: int) -> None:
    log, count = tmp_path / "rank0.log", 4000
    with open(log, "a") as rank:
        for number in range(count):
            rank.write(f"step {number}\n")
            rank.flush()
            processes.split_log(log, last_parts=last_parts, most=800, end=100)
    first, *others = processes.find_log_parts(log)
    assert len(others) == last_parts
    assert sum(file.stat().st_size for file in (*others, log)) <= 800 * (last_parts + 1)
    lines = first.read_text().splitlines()
    left_out = [int(line.split()[-3]) for line in lines if line.startswith("[... rank0.log.")]
    assert lines[0] == "step 0"
    assert log.read_text().endswith(f"step {count - 1}\n")
    kept = [line for line in read_whole(log).splitlines(keepends=True) if line.startswith("step")]
    assert sum(left_out) + len("".join(kept)) == sum(len(f"step {number}\n") for number in range(count))
    assert kept == sorted(kept, key=lambda line: int(line.split()[1]))


def test_a_log_stays_whole_where_a_part_has_no_room(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    log.write_text("a line\n" * 200)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, hard))  # as a full disk does, it ends a write half-way
    try:
        processes.split_log(log, last_parts=6, most=800, end=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert log.read_text() == "a line\n" * 200
    assert processes.find_log_parts(log) == []


def test_a_name_that_the_kernel_cut_amid_a_character_is_read() -> None:
    names_itself = (
        "import sys; open('/proc/self/comm', 'wb').write('обучение'.encode()); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", names_itself]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.read_status(child.pid)["Name"].startswith("обучени")
        assert processes.status_bytes(child.pid, "RssAnon", "NoSuchField").keys() == {"RssAnon"}
        assert processes.measure_work(child.pid).moved_bytes > 0
        assert not processes.is_compiling(child.pid)


def test_a_file_of_the_users_hides_no_module_from_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "psutil.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    assert processes.ask_module("autods.rank.ops", "state", limit_s=60.0) == {}


def test_a_process_that_may_crash_writes_no_core():
    code = "import resource as r; from autods.system import processes; processes.forbid_core_dump(); "
    limits = subprocess.check_output([sys.executable, "-c", code + "print(*r.getrlimit(r.RLIMIT_CORE))"], text=True)
    assert limits.split() == ["0", str(resource.getrlimit(resource.RLIMIT_CORE)[1])]
