"""`autods probe` on the command line: what reaches the question, what is printed, and the exit codes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from autods.api import UseCase
from autods.cli.main import main
from autods.errors import Interrupted
from autods.events import Listener, Note
from autods.prober.probe_settings import ProbeSettings
from autods.prober.run import probe
from autods.report.results.probe import ProbeReport
from autods.report.serialize import read_probe
from autods.requests import ProbeRequest
from autods.runner.testing import surface
from tests.support.probes import LIMIT, MIB, Bench, ask, probed

SURFACE = surface(limit_bytes=LIMIT, state_bytes=100 * MIB, sample_bytes=100 * MIB)


class Fake:
    """The command with a made-up machine; what it was asked is kept."""

    def __init__(self, folder: Path, *vary: str, error: BaseException | None = None) -> None:
        self.folder, self.vary, self.error = folder, vary, error
        self.request: ProbeRequest | None = None

    def resolve(self, request: ProbeRequest) -> ProbeSettings:
        self.request = request
        return ask(self.folder, *self.vary)

    def run(self, question: ProbeSettings, listen: Listener) -> ProbeReport:
        if self.error is not None:
            raise self.error
        return probed(question, Bench(SURFACE), listen)

    def __call__(self, *argv: str) -> int:
        return main(["probe", "model.py", *argv], probe=UseCase(self.resolve, self.run))


def test_the_table_is_on_stdout_and_progress_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(tmp_path, "rung=zero1,zero2")("--vary", "rung=zero1,zero2") == 0
    out, err = capsys.readouterr()
    assert "fastest: cell" in out
    assert "model: 2 cells, each 3 times, in turns" in err
    assert "trial 1: zero1, micro batch 1 × 2 (probe): fits" in err
    assert "trial 1" not in out


def test_the_answer_comes_first_with_each_warning_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(question: ProbeSettings, listen: Listener) -> ProbeReport:
        @contextmanager
        def begin(settings: object, listen: Listener) -> Iterator[Bench]:
            listen(Note(text="the machine is busy", warns=True))
            yield Bench(SURFACE)

        return probe(question, listen=listen, start=begin)

    fake = Fake(tmp_path, "rung=zero1,zero2")
    assert main(["probe", "model.py"], probe=UseCase(fake.resolve, run)) == 0
    out, err = capsys.readouterr()
    assert err.count("the machine is busy") == 1
    assert "the machine is busy" not in out
    assert out.index("fastest: cell") < out.index("× cell 1")
    folder = tmp_path / "out"
    assert json.loads((folder / "probe.json").read_text())["warnings"] == ["the machine is busy"]
    assert "the machine is busy" in (folder / "report.html").read_text()
    assert read_probe(folder).warnings == ("the machine is busy",)


def test_json_and_csv_print_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Fake(tmp_path)("--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "done"
    assert Fake(tmp_path)("--csv", "-") == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 1
    assert Fake(tmp_path)("--csv", str(tmp_path / "t.csv"), "-q") == 0
    out, err = capsys.readouterr()
    assert "fastest" in out
    assert err == ""
    assert (tmp_path / "t.csv").read_text().startswith("cell,rung")


def test_a_csv_that_cannot_be_written_is_an_error_of_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "t.csv", tmp_path, tmp_path / "deep" / "t.csv"):
        fake = Fake(tmp_path)
        assert fake("--csv", str(path)) == 2
        assert "cannot be written" in capsys.readouterr().err
        assert fake.request is None  # it is said before anything runs


def test_a_table_over_the_probes_own_journal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ask(tmp_path).settings.out
    out.mkdir(exist_ok=True)
    for name, code in (("journal.jsonl", 2), ("report.html", 2), ("probe.csv", 0), ("mine.csv", 0)):
        assert Fake(tmp_path)("--csv", str(out / name), "--fresh") == code, capsys.readouterr().err


def test_that_no_cell_fits_exits_1(tmp_path: Path) -> None:
    assert Fake(tmp_path, "micro_batch=9")("-q") == 1


def test_an_interrupted_probe_exits_130_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Fake(tmp_path, error=Interrupted("stopped"))("--vary", "rung=zero1", "--fresh") == 130
    assert "autods probe model.py --vary rung=zero1" in capsys.readouterr().err


def test_every_option_reaches_the_question(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    argv = (
        "--vary a=1 --vary b=2 --experiment stages --gpus 1,2 --device cpu --gpu-memory 1GiB --capacity "
        "--parallel-trials 3 --with c "
        "--nodes 2 --address h:1 "
        "--forecast-only --on a100-80gb --host-memory 1TiB --repeats 5 --steps 20 --global-batch 64 --precision fp32 "
        "--base-config b.json --as-written --config quick --ladder zero1 --strategies s --nvme-path /n --task seq2seq "
        "--seq-len 8 --target-len 4 --lora 2 --out o --no-forecast --seed 3 --zero-init --kind script -- --lr {lr} 3"
    )
    assert fake("-q", *argv.split()) == 0
    assert fake.request == ProbeRequest(
        "model.py", vary=("a=1", "b=2"), experiment="stages", gpus="1,2", device="cpu", nodes=2, address="h:1",
        gpu_memory="1GiB", capacity=True, parallel_trials=3, forecast_only=True, on="a100-80gb", host_memory="1TiB",
        repeats=5, steps=20, global_batch=64, precision="fp32", base_config="b.json", as_written=True, config="quick",
        ladder="zero1", strategies=("s",), nvme_path="/n", task="seq2seq", seq_len=8, target_len=4, lora="2", out="o",
        forecast=False, seed=3, with_rungs="c", zero_init=True, kind="script", script_args=("--lr", "{lr}", "3"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "no CUDA GPU is visible"),
        (("--device", "cpu"), "--device cpu needs the number of ranks"),
        (("--device", "cpu", "--gpus", "2", "--vary", "nonsense=1"), "there is nothing of that name to vary"),
        (("--device", "cpu", "--gpus", "2", "--vary", "rung"), "it is NAME=A,B,C"),
        (("--device", "cpu", "--gpus", "2", "--experiment", "x"), "there is no experiment 'x'"),
    ],
)
def test_wrong_input_exits_2_in_two_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    model = tmp_path / "model.py"
    model.write_text("def build_model(): ...\ndef build_batch(n): ...\n")
    assert main(["probe", str(model), *argv]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert len(err.splitlines()) <= 2
    assert out == ""
