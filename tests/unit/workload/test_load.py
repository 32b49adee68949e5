"""Workloads are identified by their content and loaded with their options."""

from __future__ import annotations

import os
import pickle
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autods.errors import InputError
from autods.workload import Workload, load, make_source
from autods.workload.load import check_process, in_one_process
from autods.workload.protocol import WorkloadError

COMPLETE = "def build_model(): ...\ndef build_batch(micro_batch_size): ...\n"


def model(folder: Path, text: str) -> Path:
    path = folder / "model.py"
    path.write_text(text)
    return path


def test_a_changed_file_changes_the_digest(tmp_path: Path) -> None:
    before = make_source(model(tmp_path, COMPLETE)).digest
    assert make_source(model(tmp_path, COMPLETE + "# changed\n")).digest != before


def test_a_changed_import_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from parts import *\n")
    (tmp_path / "parts.py").write_text("width = 1\n")
    path = model(tmp_path, "from net import Net\n" + COMPLETE)
    before = make_source(path).digest
    assert make_source(path).digest == before
    (tmp_path / "parts.py").write_text("width = 2\n")
    assert make_source(path).digest != before


def test_a_workload_object_is_pickled_by_value(tmp_path: Path) -> None:
    made = Workload(build_model=lambda: 1, build_batch=lambda n: (n,), deepspeed_config={"gradient_clipping": 2.0})
    source = make_source(made, folder=tmp_path)
    assert Path(source.path).exists()
    assert source.base_config == {"gradient_clipping": 2.0}


def test_a_builtin_of_python_is_pickled_by_its_name(tmp_path: Path) -> None:
    source = make_source(Workload(build_model=int, build_batch=tuple), folder=tmp_path)  # type: ignore[arg-type]
    assert load(source).build_model() == 0


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ({"build_batch": lambda: 1}, "build_batch cannot be called as build_batch(micro_batch_size): too many"),
        ({"build_model": lambda: 1, "loss": lambda model: 1}, "loss cannot be called as loss(model, batch): too many"),
    ],
)
def test_a_function_of_another_signature_is_refused(functions: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        make_source(Workload(**{"build_model": int, "build_batch": tuple} | functions), folder=tmp_path)
    place, _, rest = str(caught.value).partition(": ")
    assert place.startswith(f"{__file__}:")
    assert rest.startswith(said)
    assert "\n  write def " in rest


def test_an_argument_that_nothing_gives_is_refused_in_a_rank(tmp_path: Path) -> None:
    workload = Workload(build_model=int, build_batch=lambda n, seq_len: (n, seq_len))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"{re.escape(__file__)}:\d+: .*missing a required argument: 'seq_len'"):
        load(make_source(workload, folder=tmp_path))
    assert load(make_source(workload, folder=tmp_path, seq_len=8)).build_batch(2) == (2, 8)


def test_a_file_as_the_output_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(InputError) as caught:
        make_source(Workload(build_model=int, build_batch=tuple), folder=tmp_path / "out")  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{tmp_path / 'out'}: cannot be written: ")
    assert caught.value.hint == "give another folder with --out"


def test_a_workload_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be sent"):
        make_source(Workload(build_model=lambda: lock, build_batch=lambda n: (n,)), folder=tmp_path)


def test_a_build_batch_with_seq_len_gets_it(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text("def build_model(): ...\ndef build_batch(micro_batch_size, seq_len=16): return [seq_len]\n")
    assert load(make_source(model, seq_len=8)).build_batch(1) == [8]
    assert load(make_source(model)).build_batch(1) == [16]


def test_seq_len_needs_an_argument_of_build_batch(tmp_path: Path) -> None:
    workload = Workload(build_model=lambda: None, build_batch=lambda n: {})  # type: ignore[arg-type,return-value]
    with pytest.raises(InputError, match="no argument seq_len"):
        make_source(workload, folder=tmp_path, seq_len=8)


def test_a_source_tells_whether_it_takes_seq_len(tmp_path: Path) -> None:
    assert not make_source(model(tmp_path, COMPLETE)).takes_seq_len
    assert make_source(model(tmp_path, COMPLETE.replace("size", "size, seq_len=16"))).takes_seq_len
    assert make_source(model(tmp_path, COMPLETE.replace("size", "size, **others"))).takes_seq_len
    assert not make_source(Workload(build_model=int, build_batch=lambda n: n), folder=tmp_path).takes_seq_len  # type: ignore[arg-type]
    script = tmp_path / "train.py"
    script.write_text("import deepspeed\ndeepspeed.initialize()\n")
    assert not make_source(script).takes_seq_len
    images = tmp_path / "config.json"
    images.write_text('{"model_type": "vit", "architectures": ["ViTForImageClassification"]}')
    assert not make_source(images).takes_seq_len
    assert make_source(images, task="causal-lm").takes_seq_len


def test_only_a_script_keeps_its_own_checkpointing(tmp_path: Path) -> None:
    script, model = tmp_path / "train.py", tmp_path / "model.py"
    script.write_text("import deepspeed\ndeepspeed.initialize()\n")
    model.write_text("def build_model(): ...\ndef build_batch(micro_batch_size): ...\n")
    kept, switched = (make_source(script, keep_checkpointing=keep) for keep in (True, False))
    assert (kept.keeps_checkpointing, switched.keeps_checkpointing) == (True, False)
    assert kept.digest != switched.digest
    with pytest.raises(InputError, match="--keep-checkpointing is for a training script"):
        make_source(model, keep_checkpointing=True)


def test_a_pickle_that_others_may_have_written_is_not_loaded(tmp_path: Path) -> None:
    source = make_source(Workload(build_model=lambda: 1, build_batch=lambda n: (n,)), folder=tmp_path)  # type: ignore[arg-type,return-value]
    assert load(source).build_batch(3) == (3,)
    Path(source.path).write_bytes(pickle.dumps(Planted(tmp_path / "executed")))
    Path(source.path).chmod(0o666)
    with pytest.raises(WorkloadError, match=r"every user may write to .*pkl, and its content would be executed"):
        load(source)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_of_another_user_is_written_anew(tmp_path: Path) -> None:
    workload = Workload(build_model=lambda: 1, build_batch=lambda n: (n,))  # type: ignore[arg-type,return-value]
    planted = Path(make_source(workload, folder=tmp_path).path)
    planted.write_bytes(pickle.dumps(Planted(tmp_path / "executed")))
    planted.chmod(0o666)
    assert load(make_source(workload, folder=tmp_path)).build_batch(3) == (3,)
    assert planted.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "executed").exists()


class Planted:
    """What a stranger would like us to unpickle."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def run_in_block(act: Callable[[int], object]) -> tuple[int, str]:
    """The exit code of a process whose user's code forks and does this in the new process, and what it reports."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with in_one_process(lambda error: os.write(writer, str(error).encode())):
                if (child := os.fork()) == 0:
                    act(os.getppid())
                else:
                    os.waitpid(child, 0)
        finally:
            os._exit(7)
    os.close(writer)
    with open(reader) as report:
        text = report.readline()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text.strip()


def test_a_forked_process_that_raises_ends_alone(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_in_block(lambda pid: sys.exit()) == (7, "")
    assert "SystemExit" in capfd.readouterr().err


@pytest.mark.parametrize("act", [lambda pid: None, check_process], ids=["leaves the block", "reaches a phase"])
def test_a_forked_process_that_goes_on_ends_both(act: Callable[[int], object]) -> None:
    problem = "os.fork() was called, and the new process goes on as a second rank"
    assert run_in_block(act) == (-signal.SIGKILL, problem)
