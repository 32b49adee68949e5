"""What another user of the machine gets during a fit: the ranks of one fit wait in `forward` for all attempts."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from autods.runner.cleanup import PREFIX, ROOT
from tests.support.grpc_call import list_methods
from tests.support.hostile import OtherUser
from tests.support.watching import Scene, start_fit

_TOKEN = re.compile(rb"RAY_AUTH_TOKEN=([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class HeldFit:
    """A fit whose ranks wait in `forward`."""

    driver: int
    folder: Path  # the private one
    planted: Path  # a link of the other user's, of a name like the folder's, to a file of ours
    ranks: frozenset[int]

    def processes(self) -> dict[int, str]:
        """All processes of the fit, with their names."""
        driver = psutil.Process(self.driver)
        return {process.pid: process.name() for process in [driver, *driver.children(recursive=True)]}

    def ray_ports(self) -> dict[int, str]:
        """The ports where Ray's processes of the fit listen, with the names of those."""
        ports = {}
        for pid, name in self.processes().items():
            if pid not in self.ranks:
                for link in psutil.Process(pid).net_connections("tcp"):
                    if link.status == psutil.CONN_LISTEN:
                        ports[link.laddr.port] = name
        return ports


@pytest.fixture(scope="module")
def held(other: OtherUser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldFit]:
    scene = Scene.at(tmp_path_factory.mktemp("held"))
    victim = scene.path.parent / "private"
    victim.mkdir()
    (victim / "precious").write_text("precious")
    planted = ROOT / f"{PREFIX}1-planted{os.getpid()}"
    other.python("import os, sys\nos.symlink(sys.argv[1], sys.argv[2])", victim, planted)
    assert planted.lstat().st_uid == other.uid
    scene.choose_fault("hang", "forward")
    driver = start_fit(scene)
    try:
        scene.wait_for_fault()
        (folder,) = ROOT.glob(f"{PREFIX}{driver.pid}-*")
        yield HeldFit(driver.pid, folder, planted, frozenset(scene.note_ranks()))
        driver.send_signal(signal.SIGINT)
        driver.wait(60)
    finally:
        driver.kill()
        driver.wait()
        planted.unlink(missing_ok=True)


# What another user tries with files, and the error that it gets. `folder` is the fit's private one, `session` that of
# Ray, of which the names are told: they could not be listed. `mine` is a file of the other user's.
FILES = {
    "list the private folder": "os.listdir(folder)",
    "list Ray's folder": "os.listdir(session)",
    "read a log": "open(session + '/logs/raylet.out').read()",
    "append to a log": "open(session + '/logs/raylet.out', 'a')",
    "make a file": "open(session + '/logs/planted', 'w')",
    "make a folder": "os.mkdir(folder + '/planted')",
    "swap session_latest for a link": "os.rename(session_latest, session_latest + '.old')",
    "plant a link": "os.symlink(mine, session_latest + '.new')",
    "rename a socket": "os.rename(session + '/sockets/raylet', session + '/sockets/raylet.old')",
    "remove a socket": "os.unlink(session + '/sockets/raylet')",
    "connect to the raylet's socket": "socket.socket(socket.AF_UNIX).connect(session + '/sockets/raylet')",
    "connect to the object store": "socket.socket(socket.AF_UNIX).connect(session + '/sockets/plasma_store')",
    "lock the folder": "os.open(folder, os.O_RDONLY)",
    "rename the folder": "os.rename(folder, folder + '.old')",
    "remove the folder": "os.rmdir(folder)",
    "open the folder to all": "os.chmod(folder, 0o777)",
}


@pytest.fixture(scope="module")
def answers(held: HeldFit, other: OtherUser) -> dict[str, str]:
    """What each attempt with files got, all tried by one process."""
    session = (held.folder / "r" / "session_latest").resolve()
    code = [
        "import json, os, socket, sys",
        "folder, session, attempts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])",
        "session_latest, mine = folder + '/r/session_latest', os.getcwd() + '/mine'",
        "open(mine, 'w').write('planted')",
        "got = {}",
        "for name, attempt in attempts.items():",
        "    try: got[name] = repr(eval(attempt))",
        "    except OSError as error: got[name] = type(error).__name__",
        "print(json.dumps(got))",
    ]
    assert (session / "sockets" / "raylet").is_socket()
    tried = other.python("\n".join(code), held.folder, session, json.dumps(FILES))
    assert tried.returncode == 0, tried.stderr
    return json.loads(tried.stdout)


@pytest.mark.parametrize("attempt", FILES)
def test_files_of_a_fit_are_closed(answers: dict[str, str], attempt: str) -> None:
    assert answers[attempt] == "PermissionError"


def test_a_planted_link_is_not_followed(held: HeldFit) -> None:
    assert held.planted.is_symlink()
    assert (held.planted / "precious").read_text() == "precious"


def test_processes_of_a_fit_are_closed(held: HeldFit, other: OtherUser) -> None:
    """Neither their environment, nor their descriptors, nor their memory can be read, and none can be signalled."""
    code = [
        "import json, os, signal, sys",
        "got = []",
        "for pid in json.loads(sys.argv[1]):",
        "    for attempt in (",
        "        lambda: open(f'/proc/{pid}/environ', 'rb').read(),",
        "        lambda: open(f'/proc/{pid}/mem', 'r+b'),",
        "        lambda: os.listdir(f'/proc/{pid}/fd'),",
        "        lambda: os.listdir(f'/proc/{pid}/cwd'),",
        "        lambda: os.kill(pid, signal.SIGCONT),",
        "    ):",
        "        try: attempt(); got.append(f'{pid}: no error')",
        "        except PermissionError: got.append('PermissionError')",
        "print(json.dumps(got))",
    ]
    tried = other.python("\n".join(code), json.dumps(sorted(held.processes())))
    assert Counter(json.loads(tried.stdout)) == {"PermissionError": 5 * len(held.processes())}, tried.stdout


def test_the_token_is_in_no_command_line_and_no_home(held: HeldFit, other: OtherUser) -> None:
    (raylet,) = [pid for pid, name in held.processes().items() if name == "raylet"]
    match = _TOKEN.search(Path(f"/proc/{raylet}/environ").read_bytes())
    assert match is not None
    code = [
        "import glob, sys",
        "token, texts = sys.stdin.read().encode(), []",
        "for path in glob.glob('/proc/[0-9]*/cmdline'):",
        "    try: texts.append(open(path, 'rb').read())",
        "    except (FileNotFoundError, ProcessLookupError): pass  # it ended meanwhile",
        "print(len(texts) > 5, sum(token in text for text in texts))",
    ]
    tried = other.python("\n".join(code), stdin=match[1].decode())
    assert tried.stdout == "True 0\n", tried.stderr
    for pid in (held.driver, *held.ranks):
        assert match[1] not in Path(f"/proc/{pid}/environ").read_bytes()


def test_all_ports_of_ray_are_on_loopback(held: HeldFit) -> None:
    for pid in held.processes():
        for link in psutil.Process(pid).net_connections("tcp"):
            assert link.status != psutil.CONN_LISTEN or link.laddr.ip in ("127.0.0.1", "::ffff:127.0.0.1"), link


@pytest.mark.parametrize("token", ["", "0" * 64], ids=["no token", "a wrong token"])
def test_no_method_of_ray_answers_without_its_token(held: HeldFit, other: OtherUser, token: str) -> None:
    """Every gRPC method at every port: it is none of that server (12), or asks for the token (16)."""
    code = [
        "import json, sys",
        "from tests.support.grpc_call import call_each",
        "ports, methods, token = json.load(sys.stdin)",
        "print(json.dumps({f'{name} at {port}': call_each(port, methods, token) for port, name in ports}))",
    ]
    ports = [(port, name) for port, name in held.ray_ports().items() if "RuntimeEnv" not in name]  # which has HTTP
    asked = json.dumps([ports, list_methods(), token])
    tried = other.python("\n".join(code), stdin=asked)
    assert tried.returncode == 0, tried.stderr
    answers = {(name, path): status for name, by in json.loads(tried.stdout).items() for path, status in by.items()}
    assert {at: status for at, status in answers.items() if status not in ("12", "16")} == {}
    assert {name for name, by in json.loads(tried.stdout).items() if "16" in by.values()} == {
        f"{name} at {port}" for port, name in ports
    }


@pytest.mark.parametrize("header", ["", f"Authorization: Bearer {'0' * 64}\r\n"], ids=["no token", "a wrong token"])
def test_http_of_ray_asks_for_the_token(held: HeldFit, other: OtherUser, header: str) -> None:
    (port,) = [port for port, name in held.ray_ports().items() if "RuntimeEnv" in name]
    code = [
        "import socket, sys",
        "link = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10)",
        "request = f'POST /get_runtime_envs_info HTTP/1.0\\r\\n{sys.argv[2]}Content-Length: 0\\r\\n\\r\\n'",
        "link.sendall(request.encode())",
        "print(link.recv(1000).split()[1].decode())",
    ]
    tried = other.python("\n".join(code), port, header)
    assert tried.stdout.strip() == ("403" if header else "401"), tried.stderr


def test_shared_memory_of_a_fit_is_closed(held: HeldFit) -> None:
    names = {str(pid) for pid in held.processes()}
    for path in Path("/dev/shm").iterdir():
        if names & set(re.findall(r"\d+", path.name)):
            assert path.stat().st_mode & 0o077 == 0, path
