"""User code that never comes back is named by its line."""

from __future__ import annotations

import fcntl
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autods.config.profiles import find_toml
from autods.errors import EnvironmentBroken
from autods.events import Event, Note
from autods.runner.runner import RayRunner
from autods.system.host import data_folder
from tests.support.bad_workloads import GOOD
from tests.support.fits import question
from tests.support.hostile import Case, each
from tests.support.watching import find_pids, read_command, wait_for

_QUICK = find_toml("quick", data_folder("configs"), "config").read_text()
_SHORT = _QUICK.replace("stall_s = 60.0", "stall_s = 1.5").replace("init_s = 900.0", "init_s = 6.0")
_FIT = "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB --config short.toml --quiet --out out"
_SLEEP = "__import__('time').sleep(10000)"
_FORWARD = "        return self.layer(x).mean()"
_BATCH = '    return {"x": torch.ones(micro_batch_size, 4)}'


def hangs(old: str, new: str, message: str) -> Case:
    """A fit of the good workload with one change. It has to end with the message, whatever the number of rungs."""
    assert old in GOOD
    files = {"model.py": GOOD.replace(old, new), "short.toml": _SHORT}
    return Case(_FIT, 2, message, "ranks", files=files, leaves=("out",), seconds=300)  # Ray starts in the first


_DEADLOCK = """        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(1)
        pool.submit(lambda: pool.submit(int).result()).result()
"""
_OPTIMIZER = """

class Slow(torch.optim.SGD):
    def step(self, closure=None):
        if any(weight.grad is not None for group in self.param_groups for weight in group["params"]):
            __import__("time").sleep(10**6)


def build_optimizer(parameters):
    return Slow(parameters, lr=0.1)
"""
_LOADER = f"""    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            {_SLEEP}

    next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
"""
_HANGS = "it hangs here: no rank moved for"
_AT_START = f"{_HANGS} 6 s"
_EOF = "EOFError: EOF when reading a line"

IN_USER_CODE = {
    "build_model": hangs("    return Model()", "    while True: pass", f"model.py:14: {_AT_START}"),
    "a data loader": hangs(_BATCH, _LOADER + _BATCH, f"model.py:25: {_AT_START}"),
    "the optimizer": hangs(_BATCH, _BATCH + _OPTIMIZER, _AT_START),
    "input() at import": hangs("\n\nclass", "\ninput()\n\nclass", f"model.py:3: {_EOF}"),
    "input() in forward": hangs(_FORWARD, f"        input()\n{_FORWARD}", f"model.py:10: {_EOF}"),
}


@each(IN_USER_CODE)
def test_user_code_that_hangs_ends_with_its_line(meet, case):
    meet(case)


IN_A_STEP = {
    "forward": hangs(_FORWARD, f"        {_SLEEP}\n{_FORWARD}", f"model.py:10: {_HANGS}"),
    "a deadlock in a pool of threads": hangs(_FORWARD, _DEADLOCK + _FORWARD, f"model.py:12: {_HANGS}"),
}


@each(IN_A_STEP)
def test_a_hang_in_a_step_does_not_wait_for_the_start_limit(meet, case):
    waited = re.search(rf"{_HANGS} (\d+) s", meet(case).stderr)  # 2 s where nothing else runs
    assert waited is not None
    assert 2 <= int(waited[1]) < 6


@pytest.fixture
def forever(tmp_path) -> Path:
    """A workload whose import never ends."""
    path = tmp_path / "forever.py"
    path.write_text(GOOD.replace("\n\nclass", f"\n\ndef wait():\n    {_SLEEP}\n\n\nwait()\n\n\nclass"))
    return path


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.texts.append(event.text)

    def has(self, words: str) -> bool:
        return any(words in text for text in self.texts)


def test_an_import_that_never_ends_is_located(ray, forever, tmp_path, monkeypatch):
    monkeypatch.setattr("autods.system.waiting.FIRST_S", 1.0)
    monkeypatch.setattr("autods.system.waiting.AGAIN_S", 1.0)
    heard = Heard()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(RayRunner(question(str(forever), tmp_path / "out"), heard).__enter__)
        wait_for(lambda: heard.has(f"so far: in wait, {forever}:5"), 120)
        for pid in find_pids("autods.runner.zygote"):
            if f'"{forever}"' in read_command(pid):
                os.kill(pid, signal.SIGKILL)
        assert isinstance(starting.exception(60), EnvironmentBroken)


def test_a_second_fit_into_a_folder_is_refused(meet):
    def hold(path: Path) -> None:
        lock = os.open(path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        held.append(lock)

    held: list[int] = []
    files = {"short.toml": _SHORT, "out/.autods.lock": hold}
    try:
        meet(Case(_FIT, 2, "another fit is running in this folder", "ranks", files=files, leaves=("out",)))
    finally:
        os.close(held[0])
