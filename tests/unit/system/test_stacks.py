"""The user's line in a stack that a process wrote into its log."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from autods.system import processes
from autods.system.stacks import (
    Frame,
    ask,
    awaits_ranks,
    describe_place,
    find_hang,
    find_raiser,
    find_user_frame,
    is_in_wait,
    parse_stack,
)

LIBRARY = "/venv/lib/python3.11/site-packages"


def stack(*frames: str, heading: str = "Current thread 0x00007f (most recent call first):") -> str:
    return "\n".join([heading, *(f'  File "{file}", line {n} in f' for n, file in enumerate(frames, 1)), ""])


def test_the_last_stack_of_a_log_counts() -> None:
    log = stack("/home/me/old.py", heading="Stack (most recent call first):") + "words\n" + stack("/home/me/new.py")
    assert [str(frame) for frame in parse_stack(log)] == ["/home/me/new.py:1"]


def test_the_main_thread_is_the_one_that_is_asked() -> None:
    code = """
import signal, threading
from autods.system import stacks
stacks.answer_requests()
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {stacks._ASK})
print("ready", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        assert ask(child.pid)
        assert int(processes.read_status(child.pid)["SigPnd"], 16)  # of this thread alone; ShdPnd has the process's
        child.stdin.close()


def test_installed_packages_are_not_the_users_code() -> None:
    files = (f"{LIBRARY}/torch/x.py", "/usr/lib/python3.11/threading.py", "<frozen runpy>", "/home/me/model.py")
    assert str(find_user_frame(parse_stack(stack(*files)))) == "/home/me/model.py:4"


def test_a_rank_in_a_collective_does_not_hang_by_itself() -> None:
    assert find_hang(stack(f"{LIBRARY}/torch/distributed/c10d.py", "/home/me/model.py")) is None
    assert find_hang(stack(f"{LIBRARY}/deepspeed/runtime/engine.py", "/home/me/model.py")) is None


@pytest.mark.parametrize(
    ("file", "function"),
    [("torch/cuda/streams.py", "synchronize"), ("torch/cuda/__init__.py", "synchronize")],
)
def test_a_rank_that_waits_for_its_card_does_not_hang_by_itself(file: str, function: str) -> None:
    """With NCCL the host launches a collective and goes on, until it waits for the card."""
    log = (
        "Current thread 0x00007f (most recent call first):\n"
        f'  File "{LIBRARY}/{file}", line 254 in {function}\n'
        '  File "/venv/autods/rank/training_run/session.py", line 260 in step_done\n'
        '  File "/home/me/train.py", line 7 in main\n'
    )
    assert (find_hang(log), awaits_ranks(log), is_in_wait(log)) == (None, True, True)


def test_a_rank_that_joins_losses_does_not_hang_by_itself() -> None:
    log = stack("/venv/autods/rank/training_run/consensus.py", "/home/me/train.py")
    assert (find_hang(log), awaits_ranks(log)) == (None, True)


def test_other_code_of_torchs_cuda_is_no_wait() -> None:
    assert str(find_hang(stack(f"{LIBRARY}/torch/cuda/memory.py", "/home/me/train.py"))) == "/home/me/train.py:2"


def test_user_code_that_deepspeed_calls_can_hang() -> None:
    frame = find_hang(stack("/home/me/model.py", f"{LIBRARY}/deepspeed/runtime/engine.py"))
    assert str(frame) == "/home/me/model.py:1"


def test_a_hook_of_the_backward_pass_hangs_in_its_thread() -> None:
    hook = stack("/home/me/hook.py", heading="Thread 0x00007e (most recent call first):")
    main = stack(f"{LIBRARY}/torch/autograd/graph.py", "/venv/autods/rank/model_trial.py")
    assert str(find_hang(f"{hook}\n{main}")) == "/home/me/hook.py:1"


def test_a_log_without_a_stack_shows_no_hang() -> None:
    assert find_hang("a warning\n") is None


def test_a_library_that_works_for_a_script_is_the_place() -> None:
    below = Frame("/venv/lib/python3.11/site-packages/torch/_ops.py", 9, "call")
    library = Frame("/venv/lib/python3.11/site-packages/transformers/generation/utils.py", 3229, "_sample")
    above = Frame("/usr/lib/python3.11/runpy.py", 88, "_run_code")
    assert describe_place(1, (below, library, above)) == f"in _sample, {library}, which generates text token by token"
    assert describe_place(1, (below, above)) == f"in call, {below}"
    users = Frame("/home/me/train.py", 7, "main")
    assert describe_place(1, (below, library, users, above)) == f"in main, {users}, which generates text token by token"


def test_a_program_that_is_an_installed_package_has_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "some_trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "core.py").write_text("import json\n\ndef train(text):\n    return json.loads(text)\n")
    (package / "cli.py").write_text("from some_trainer.core import train\n\ntrain('{')\n")
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # of json's decoder
        runpy.run_module("some_trainer.cli", run_name="__main__", alter_sys=True)
    error = raised.value.with_traceback(raised.tb.tb_next)  # without this file
    frame = find_raiser(error)
    assert frame is not None
    assert str(frame) == f"{package / 'core.py'}:4"
    assert frame.code == "return json.loads(text)"
