"""Start Ray or join a cluster: what is no address, what does not answer, and what is said of Ray's failures."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.runner import cleanup, ray_connect
from autods.runner.ray_connect import (
    find_cluster,
    find_head_problem,
    import_ray,
    join_cluster,
    ray_internal,
    session,
    start_local,
)


class FakeRay:
    """Fails with `error` in its first `failures` starts."""

    def __init__(self, error: Exception | None = None, failures: int = 1) -> None:
        self.error, self.failures = error, failures
        self.options: list[dict[str, Any]] = []
        self.environments: list[dict[str, str]] = []  # of this process when Ray was started
        self.shutdowns = 0

    def init(self, **options: Any) -> None:
        self.options.append(options)
        self.environments.append(dict(os.environ))
        if self.error is not None and len(self.options) <= self.failures:
            raise self.error

    def shutdown(self) -> None:
        self.shutdowns += 1

    def is_initialized(self) -> bool:
        return False


class FakeNode:
    """Ray's node: what it has started."""

    started: ClassVar[list[str]] = []

    def start_gcs_server(self) -> None:
        self.started.append("GCS")

    def start_log_monitor(self) -> None:
        self.started.append("log monitor")

    def start_api_server(self, *, include_dashboard: bool, raise_on_failure: bool) -> None:
        self.started.append("API server")


@pytest.fixture
def reads() -> list[str | None]:
    """The token that Ray found each time when it was told to look for one."""
    return []


@pytest.fixture(autouse=True)
def _no_ray_internals(monkeypatch: pytest.MonkeyPatch, reads: list[str | None]) -> None:
    """Ray's modules, made up, and no session; the variables that Ray reads are none of this process afterwards."""
    import_ray()  # completely: what it would import later must not meet what is made up here
    monkeypatch.setattr(cleanup, "_opened", {})
    services = SimpleNamespace(ConsolePopen=subprocess.Popen, resolve_ip_for_localhost=lambda host: "10.0.0.9")
    monkeypatch.setitem(sys.modules, "ray._private.services", services)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "ray._private.node", SimpleNamespace(Node=FakeNode))  # type: ignore[arg-type]
    loader = SimpleNamespace(reset_cache=lambda: reads.append(os.environ.get("RAY_AUTH_TOKEN")))
    raylet = SimpleNamespace(
        Config=SimpleNamespace(initialize=lambda config: None),
        AuthenticationTokenLoader=SimpleNamespace(instance=lambda: loader),
    )
    monkeypatch.setitem(sys.modules, "ray._raylet", raylet)  # type: ignore[arg-type]


TIMED_OUT = Exception("The current node timed out during startup.\nThis could happen because ...")


def test_ray_is_not_started_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connect, "_SESSION_BYTES", 2**60)
    ray = FakeRay()
    with pytest.raises(EnvironmentBroken, match="the disk is full: Ray needs"), start_local(ray, 2, tmp_path):
        pass
    assert ray.options == []


def test_our_ray_starts_only_what_trials_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNode, "started", [])

    def start(**options: Any) -> None:
        FakeNode().start_gcs_server()
        FakeNode().start_log_monitor()
        FakeNode().start_api_server(include_dashboard=False, raise_on_failure=False)

    ray = FakeRay()
    monkeypatch.setattr(ray, "init", start)
    with start_local(ray, 2, tmp_path):
        pass
    assert FakeNode.started == ["GCS"]
    FakeNode().start_log_monitor()  # of a Ray that somebody else starts later
    assert FakeNode.started == ["GCS", "log monitor"]


def test_ray_is_not_started_under_a_limit_that_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda number: (64, 64) if number == resource.RLIMIT_NOFILE else (-1, -1))
    ray = FakeRay()
    with pytest.raises(EnvironmentBroken, match="`ulimit -n` is 64: Ray needs 256"), start_local(ray, 2, tmp_path):
        pass
    assert ray.options == []


def test_a_ray_that_misses_its_time_once_is_started_again(tmp_path: Path) -> None:
    ray = FakeRay(TIMED_OUT, failures=1)
    with start_local(ray, 2, tmp_path):
        assert (len(ray.options), ray.shutdowns) == (2, 1)
    assert ray.shutdowns == 2


def test_a_ray_that_fails_twice_is_reported_in_two_lines(tmp_path: Path) -> None:
    ray = FakeRay(TIMED_OUT, failures=2)
    with pytest.raises(EnvironmentBroken) as broken, start_local(ray, 2, tmp_path):
        pass
    first, second = str(broken.value).splitlines()
    assert "timed out during startup" in first
    assert "/dev/shm" in second
    assert len(ray.options) == 2


def test_ray_gets_a_folder_below_a_private_one(tmp_path: Path) -> None:
    ray = FakeRay()
    with start_local(ray, 1, tmp_path):
        assert Path(ray.options[0]["_temp_dir"]).parent == tmp_path


def test_a_shutdown_that_waits_for_ray_ends_with_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The raylet is another process of ours that has the folder in its command."""
    monkeypatch.setattr(ray_connect, "_SHUTDOWN_S", 0.1)
    raylet, other = (
        subprocess.Popen(["sh", "-c", "read line", word], stdin=subprocess.PIPE) for word in (str(tmp_path), "other")
    )
    ray = FakeRay()
    ray.shutdown = raylet.wait  # type: ignore[method-assign]
    try:
        with start_local(ray, 1, tmp_path):
            pass
        assert (raylet.poll(), other.poll()) == (-signal.SIGKILL, None)
    finally:
        for process in (raylet, other):
            process.kill()
            process.communicate()


def test_each_ray_has_a_token_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes find it in their environment; this process has its own variables back when they run."""
    users = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "the user's"}
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    rays = [FakeRay(), FakeRay()]
    for ray in rays:
        with start_local(ray, 1, tmp_path):
            assert {name: os.environ[name] for name in users} == users
    tokens = [ray.environments[0]["RAY_AUTH_TOKEN"] for ray in rays]
    assert [ray.environments[0]["RAY_AUTH_MODE"] for ray in rays] == ["token", "token"]
    assert len({*tokens, "the user's"}) == 3
    assert min(map(len, tokens)) == 64
    assert not any(token in str(ray.options) for ray, token in zip(rays, tokens, strict=True))


def test_ray_reads_the_token_before_its_start_and_forgets_it(tmp_path: Path, reads: list[str | None]) -> None:
    ray = FakeRay()
    with start_local(ray, 1, tmp_path):
        pass
    assert reads == [ray.environments[0]["RAY_AUTH_TOKEN"], None]


def test_processes_of_ray_carry_the_folder_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay()
    monkeypatch.setattr(ray_connect, "import_ray", lambda: ray)
    with session(cpus=1):
        assert "AUTODS_SESSION" not in os.environ
    carried = ray.environments[0]["AUTODS_SESSION"]
    assert Path(ray.options[0]["_temp_dir"]).parent == Path(carried)
    assert not Path(carried).exists()


def test_a_ray_of_the_user_is_not_touched(monkeypatch: pytest.MonkeyPatch, reads: list[str | None]) -> None:
    ray = FakeRay()
    ray.is_initialized = lambda: True  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    with session(cpus=1) as module:
        assert module is ray
    assert (ray.options, ray.shutdowns, reads) == ([], 0, [])


def test_a_missing_internal_of_ray_is_reported_with_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(sys.modules["ray._private.services"], "ConsolePopen")
    ray = FakeRay()
    missing = rf"ray {version('ray')} has no ray\._private\.services\.ConsolePopen"
    with pytest.raises(EnvironmentBroken, match=missing), start_local(ray, 2, tmp_path):
        pass
    assert ray.options == []


@pytest.mark.parametrize("name", ["AuthenticationTokenLoader", "Config"])
def test_a_ray_that_does_not_read_our_token_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.delattr(sys.modules["ray._raylet"], name)
    ray = FakeRay()
    missing = rf"Ray {version('ray')} has no ray\._raylet\.{name}, which autods needs"
    with pytest.raises(EnvironmentBroken, match=missing), start_local(ray, 2, tmp_path):
        pass
    assert ray.options == []


def test_the_installed_ray_has_the_internals_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    ray_connect.import_ray()  # it sets variables that Ray reads once a process
    for module, name in (
        ("ray._common.utils", "get_ray_address_file"),
        ("ray._private.state", "available_resources_per_node"),
        ("ray._raylet", "AuthenticationTokenLoader"),
        ("ray._raylet", "Config"),
        ("ray._private.authentication.authentication_token_setup", "maybe_enable_token_auth_if_token_available"),
    ):
        assert callable(ray_internal(module, name))


def test_a_cluster_is_left_as_it_was() -> None:
    ray = FakeRay()
    with join_cluster(ray, "::1", 6379):
        assert ray.options[0]["address"] == "[::1]:6379"
        assert ray.shutdowns == 0
    assert ray.shutdowns == 1


def test_the_nodes_of_a_cluster_get_our_package() -> None:
    ray = FakeRay()
    with join_cluster(ray, "10.0.0.1", 6379):
        (package,) = ray.options[0]["runtime_env"]["py_modules"]
    assert package.endswith("/autods")


def test_a_cluster_tells_ranks_which_cards_they_were_given() -> None:
    ray = FakeRay()
    with join_cluster(ray, "10.0.0.1", 6379):
        variables = ray.options[0]["runtime_env"]["env_vars"]
    assert variables == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": ""}  # no in each version of Ray, unlike "0"


def test_a_cluster_that_refuses_us_is_reported_in_two_lines() -> None:
    ray = FakeRay(RuntimeError("Version mismatch: The cluster was started with:\n  Ray: 2.9"))
    with pytest.raises(EnvironmentBroken, match="Version mismatch") as broken, join_cluster(ray, "10.0.0.1", 6379):
        pass
    assert len(str(broken.value).splitlines()) == 2
    assert ray.shutdowns == 1


def test_auto_is_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_cluster("auto") == ("10.0.0.1", 6379, "RAY_ADDRESS=10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(InputError, match=r"RAY_ADDRESS=ray://.* is neither auto"):
        find_cluster("auto")


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which Ray notes the cluster that it started last."""
    utils = SimpleNamespace(get_ray_address_file=lambda folder: str(tmp_path / "ray_current_cluster"))
    monkeypatch.setitem(sys.modules, "ray._common.utils", utils)  # type: ignore[arg-type]
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "ray_current_cluster"


def test_auto_is_the_cluster_that_this_machine_started_last(note: Path) -> None:
    note.write_text("10.0.0.1:6379\n")
    assert find_cluster("auto") == ("10.0.0.1", 6379, "--address auto, which is 10.0.0.1:6379")


def test_auto_finds_the_cluster_of_an_older_ray_too(note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note.write_text("10.0.0.1:6379\n")
    monkeypatch.setitem(sys.modules, "ray._private.utils", sys.modules["ray._common.utils"])
    monkeypatch.setitem(sys.modules, "ray._common.utils", None)  # type: ignore[arg-type]
    assert find_cluster("auto")[:2] == ("10.0.0.1", 6379)


@pytest.mark.parametrize("trap", ["a file of theirs", "a link", "a folder"])
def test_auto_follows_nobody_elses_note(note: Path, trap: str) -> None:
    if trap == "a folder":
        note.mkdir()
    elif trap == "a link":
        (note.parent / "elsewhere").write_text("10.0.0.1:6379")
        note.symlink_to(note.parent / "elsewhere")
    else:
        note.write_text("10.0.0.1:6379")
        if os.geteuid() != 0:
            pytest.skip("only root can make another user's file")
        os.chown(note, 65534, 65534)
    with pytest.raises(InputError, match=r"cannot be read|written by another user") as refused:
        find_cluster("auto")
    assert "a cluster that you trust" in str(refused.value)


def test_auto_without_a_cluster_names_the_command_for_one(note: Path) -> None:
    with pytest.raises(InputError, match="no Ray cluster runs on this machine") as refused:
        find_cluster("auto")
    assert "ray start --head" in str(refused.value)


@pytest.mark.parametrize("error", [None, InputError("is no Ray cluster")])
def test_a_session_joins_what_was_checked_and_leaves_it(
    error: InputError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(host: str, port: int, origin: str) -> None:
        if error is not None:
            raise error

    ray = FakeRay()
    monkeypatch.setattr(ray_connect, "import_ray", lambda: ray)
    monkeypatch.setattr(ray_connect, "check_cluster", check)
    if error is None:
        with session(cpus=1, address="10.0.0.1:6379"):
            assert (len(ray.options), ray.shutdowns) == (1, 0)
        assert ray.shutdowns == 1
    else:
        with pytest.raises(InputError, match="is no Ray cluster"), session(cpus=1, address="10.0.0.1:6379"):
            pass
        assert ray.options == []


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ([TimeoutError("timed out"), OSError(113, "No route to host"), None], None),
        ([TimeoutError("timed out")] * 3, "timed out"),
        ([ConnectionRefusedError(111, "Connection refused")], "connection refused"),
    ],
)
def test_a_head_that_is_silent_for_seconds_is_not_gone(
    answers: list[OSError | None], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(answers)

    def connect(*_: Any) -> SimpleNamespace:
        if (answer := next(left)) is not None:
            raise answer
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(ray_connect.socket, "create_connection", connect)
    monkeypatch.setattr(ray_connect, "_BETWEEN_S", 0.0)
    assert find_head_problem("10.0.0.1:6379") == problem
    assert not list(left)
