"""A workload that misbehaves is blamed, with its line and a hint, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from autods.runner.node_messages import Ready, decode, encode
from autods.runner.outcome import find_failure
from autods.system.processes import list_shared_memory
from tests.support.ends import JOB
from tests.support.hostile import Case, each
from tests.support.misdeeds import AT_IMPORT, IN_FORWARD, IN_OTHER_FUNCTIONS, place_in
from tests.support.watching import is_running, wait_for

FIT = "fit model.py --gpus 2 --gpu-memory 1GiB --device cpu --config quick --ladder ddp --quiet --out out"


def rows(function: str, misdeeds: dict[str, tuple[str, int | None, str]]) -> dict[str, Case]:
    """A fit for each; `line` is the line of the misdeed that the message has to name, from its first."""
    cases = {}
    for name, (code, line, message) in misdeeds.items():
        text, first = place_in(function, code)
        place = "model.py: " if line is None else f"model.py:{first + line}: "
        files = {"model.py": text}
        cases[f"{name} in {function}"] = Case(FIT, 2, place + message, "ranks", files, leaves=("out",), seconds=200)
    return cases


RANKS = {
    **rows("import", AT_IMPORT),
    **rows("forward", IN_FORWARD),
    **{
        name: case
        for function, misdeeds in IN_OTHER_FUNCTIONS.items()
        for name, case in rows(function, misdeeds).items()
    },
}


@each(RANKS)
def test_a_misdeed_is_blamed_with_its_line(meet, case):
    before = list_shared_memory()
    meet(case)
    wait_for(lambda: not find_abandoned(list_shared_memory() - before), 30)


def find_abandoned(shared: Iterable[str]) -> list[str]:
    """Return torch's files in shared memory whose maker is dead: one that lives belongs to a test that runs beside.

    Such a test removes what its dead ranks left a moment later, hence the wait above.
    """
    makers = {name: int(name.split("_")[1]) for name in shared if name.startswith("torch_")}
    return [name for name, pid in makers.items() if not is_running(pid)]


# Runs modules in copies of one process that has torch loaded, as a zygote that preloads a workload does.
PRELOAD = """
import json, os, socket, sys
from dataclasses import asdict
from pathlib import Path
from autods.runner.node_messages import Ready, encode
from autods.runner.zygote import _describe_failure, _load_workload
from autods.system import processes
from autods.rank import preload
from autods.types import WorkloadSource
preload.preload()
processes.adopt_orphans()
for path in sys.argv[1:]:
    source = WorkloadSource(kind="file", path=path, name="model", digest="")
    ours, peer = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        try:
            _load_workload(source, peer)
        except BaseException as error:
            peer.sendall(json.dumps(asdict(_describe_failure(error, source))).encode() + b"\\n")
            os._exit(0)
        peer.sendall(encode(Ready(pid=1)))
        os._exit(0)
    peer.close()
    ours.settimeout(20)
    lines = []
    try:
        while data := ours.recv(1 << 20):
            lines.append(data.decode())
    except TimeoutError:
        lines.append('"hangs"')
    processes.kill_children(2)
    print(json.dumps([json.loads(line) for line in "".join(lines).splitlines()]), flush=True)
"""


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory):
    """What a zygote reports of each module, by name; [] where it ended, so that each rank imports the module."""
    folder = tmp_path_factory.mktemp("preloaded")
    paths = {}
    for number, (name, (code, *_)) in enumerate({**AT_IMPORT, "nothing": ("pass",)}.items()):
        paths[name] = folder / f"model{number}.py"
        paths[name].write_text(place_in("import", code)[0])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", PRELOAD, *map(str, paths.values())]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(answers) == len(paths), done.stderr
    return dict(zip(paths, zip(paths.values(), answers, strict=True), strict=True))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", AT_IMPORT)
def test_a_zygote_reports_a_misdeed_or_leaves_it_to_the_ranks(preloaded, name):
    code, line, message = AT_IMPORT[name]
    path, reports = preloaded[name]
    if reports == []:  # it ended
        return
    (report,) = reports
    failure = find_failure([decode(json.dumps(report).encode())], JOB)
    first = place_in("import", code)[1]
    place = "" if line is None else f"{path}:{first + line}: "
    assert failure.action == "fix_code"
    assert f"{failure.evidence}\n".startswith(place + message)


def test_a_module_that_does_no_harm_is_preloaded(preloaded):
    assert preloaded["nothing"][1] == [json.loads(encode(Ready(pid=1)))]


def test_the_command_blames_a_module_that_its_zygote_cannot_survive(tmp_path, capfd):
    """The zygote dies of it. A second one leaves the import to the rank."""
    from autods.cli.main import main

    text, line = place_in("import", "import ctypes\nctypes.string_at(0)")
    (tmp_path / "model.py").write_text(text)
    arguments = FIT.replace("model.py", str(tmp_path / "model.py")).split()[:-1]
    assert main([*arguments, str(tmp_path / "out")]) == 2
    stderr = capfd.readouterr().err
    assert stderr.startswith(f"error: {tmp_path}/model.py:{line + 1}: killed by SIGSEGV\n"), stderr
    assert len(stderr.splitlines()) == 2
    assert not Path(f"{tmp_path}/out/report.json").exists()
