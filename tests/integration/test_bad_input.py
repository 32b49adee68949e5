"""Wrong input ends in one message that names the problem, its place and a fix: exit code 2, never a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from autods import api
from autods.cli.main import main
from autods.runner.runner import RayRunner
from autods.tuner.fit import fit
from tests.support.bad_workloads import FILLING, GOOD, IN_A_TRIAL, IN_THE_SURVEY, ON_SIGHT, TALKING
from tests.support.faults import is_one_message
from tests.support.fits import ignore, question

BUDGET = ("--gpu-memory", "1GiB")
CPU = ("--device", "cpu", "--config", "quick", "--quiet")


class Shared:
    """The command line on one zygote that cannot preload a workload, so that each rank imports its own.

    Returns the exit code; `stderr` holds its standard error.
    """

    def __init__(self, runner, capsys) -> None:
        self.runner, self.capsys, self.stderr = runner, capsys, ""

    def __call__(self, workload, out, *argv) -> int:
        args = ["fit", str(workload), "--gpus", "2", *BUDGET, *CPU, "--out", str(out), *argv]
        code = main(args, fit=replace(api.FIT, run=self._run_fit))
        self.stderr = self.capsys.readouterr().err
        return code

    def _run_fit(self, settings, listen):
        def start(settings, listen):
            self.runner.settings, self.runner.listen = settings, listen
            return contextlib.nullcontext(self.runner)

        # The messages do not depend on a forecast, which costs seconds a fit. The tests of real commands make it.
        return fit(replace(settings, forecast=False), listen=listen, start=start)


@pytest.fixture(scope="module")
def unloaded(ray, tmp_path_factory):
    with RayRunner(question("threaded.py", tmp_path_factory.mktemp("shared")), ignore) as runner:
        yield runner


@pytest.fixture
def autods(unloaded, capsys):
    return Shared(unloaded, capsys)


@pytest.fixture
def model(tmp_path):
    """A file with that text."""

    def write(text: str) -> Path:
        path = tmp_path / "model.py"
        path.write_text(text)
        return path

    return write


def place(path: Path, line: int | None) -> str:
    return f"{path}:{line}: " if line else f"{path}: "


def trials_in(out: Path) -> list[str]:
    return sorted(folder.name for folder in out.glob("logs/0*"))


@pytest.mark.parametrize("fault", IN_THE_SURVEY)
def test_a_broken_workload_is_reported_before_any_trial(autods, model, tmp_path, fault):
    bad = IN_THE_SURVEY[fault]
    path = model(bad.text)
    assert autods(path, tmp_path / "out") == 2
    assert is_one_message(autods.stderr, where=place(path, bad.line), message=bad.message)
    assert trials_in(tmp_path / "out") == []


@pytest.mark.parametrize("fault", IN_A_TRIAL)
def test_a_workload_failing_in_the_first_trial_ends_the_fit(autods, model, tmp_path, fault):
    bad = IN_A_TRIAL[fault]
    path = model(bad.text)
    assert autods(path, tmp_path / "out") == 2
    assert is_one_message(autods.stderr, where=place(path, bad.line), message=bad.message)
    assert trials_in(tmp_path / "out") == ["001-ddp"]


def test_the_log_named_in_the_message_holds_the_traceback(autods, model, tmp_path):
    autods(model(IN_A_TRIAL["a batch of the wrong width"].text), tmp_path / "out")
    log = autods.stderr.partition("log: ")[2].strip().rstrip(")")
    assert "Traceback (most recent call last)" in Path(log).read_text()


# Configs that only DeepSpeed itself can refuse.
REFUSED = {
    "fp16 on CPU ranks": ({"fp16": {"enabled": True}}, "Type fp16 is not supported on your device"),
    "a key that ZeRO does not have": ({"zero_optimization": {"stage_3": 1}}, "stage_3: Extra inputs are not permitted"),
    "an unknown optimizer": ({"optimizer": {"type": "Adamm"}}, "Adamm is not a supported DeepSpeed Optimizer"),
    "a parameter that the optimizer does not have": (
        {"optimizer": {"type": "AdamW", "params": {"rate": 1, "torch_adam": True}}},
        "unexpected keyword argument 'rate'",
    ),
    "an unknown scheduler": ({"scheduler": {"type": "Up"}}, "does not recognize LR scheduler Up"),
    "a clip that is no number": ({"gradient_clipping": "1"}, "not supported between instances of 'str' and 'float'"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_config_that_deepspeed_refuses_ends_the_fit(autods, model, tmp_path, fault):
    base, message = REFUSED[fault]
    (tmp_path / "base.json").write_text(json.dumps(base))
    if "fp16" in fault and CPU_Accelerator().is_fp16_supported():  # AVX512-FP16: DeepSpeed accepts it
        autods(model(GOOD), tmp_path / "out", "--base-config", str(tmp_path / "base.json"))
        assert message not in autods.stderr
        return
    assert autods(model(GOOD), tmp_path / "out", "--base-config", str(tmp_path / "base.json")) == 2
    assert is_one_message(autods.stderr, where="DeepSpeed config: ", message=message)
    assert trials_in(tmp_path / "out") == ["001-ddp"]


# Each a real process, as a person runs it.
def run(*argv: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "autods", "fit", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, **(env or {})})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("fault", ON_SIGHT)
def test_a_faulty_file_is_reported_without_running_it(model, tmp_path, fault):
    bad = ON_SIGHT[fault]
    path = model(bad.text)
    code, out, stderr = run(path, "--gpus", 2, *BUDGET, *CPU, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert is_one_message(stderr, where=place(path, bad.line), message=bad.message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (IN_THE_SURVEY["leaving at import"], ()),  # the zygote imports it, and must not leave with it
        (IN_A_TRIAL["a NaN loss"], ("--no-forecast",)),
    ],
    ids=["sys.exit at import", "a NaN loss"],
)
def test_the_command_reports_a_faulty_workload(model, tmp_path, fault, options):
    path = model(fault.text)
    code, out, stderr = run(path, "--gpus", 2, *BUDGET, *CPU, "--out", tmp_path / "out", *options)
    assert (code, out) == (2, "")
    assert is_one_message(stderr, where=place(path, fault.line), message=fault.message)


BASES = {
    "invalid JSON": ('{"a": 1 "b": 2}', "base.json:1:", "is not JSON"),
    "amp with ZeRO": (
        '{"amp": {"enabled": true}, "zero_optimization": {"stage": 1}}',
        "base.json",
        "amp and ZeRO exclude each other",
    ),
    "fp16 with bf16": (
        '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}',
        "base.json",
        "fp16 and bf16 are both enabled",
    ),
    "batch sizes that contradict each other": (
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}',
        "base.json",
        "train_batch_size 8 ≠ micro batch 3 × accumulation 1 × 2 ranks",
    ),
    "a value left to the HF Trainer": ('{"gradient_clipping": "auto"}', "base.json", '"gradient_clipping" is "auto"'),
}


@pytest.mark.parametrize("fault", BASES)
def test_a_base_config_that_contradicts_itself_is_refused(autods, model, tmp_path, fault):
    text, where, message = BASES[fault]
    (tmp_path / "base.json").write_text(text)
    assert autods(model(GOOD), tmp_path / "out", "--base-config", str(tmp_path / "base.json")) == 2
    assert is_one_message(autods.stderr, where=str(tmp_path / where), message=message)


OPTIONS = {
    "--gpus 0": (("--gpus", "0"), "--gpus 0: at least one rank is needed"),
    "--gpu-memory banana": (("--gpu-memory", "banana"), "banana"),
    "more memory than there is": (("--gpu-memory", "900TiB"), "this machine has"),
    "--global-batch 7 on 2 ranks": (("--global-batch", "7"), "--global-batch 7 cannot be split over 2 ranks"),
    "an unknown rung": (("--ladder", "ddp,zero9"), "zero9"),
    "an unknown config": (("--config", "fastest"), "there is no config 'fastest'"),
    "an unknown precision": (("--precision", "int3"), "there is no precision 'int3'"),
    "an unknown device": (("--device", "tpu"), "there is no device 'tpu'"),
    "an option that there is not": (("--gpuz", "2"), "--gpuz"),
    "a folder for NVMe that there is not": (("--nvme-path", "/no/such"), "--nvme-path /no/such"),
}


@pytest.mark.parametrize("fault", OPTIONS)
def test_a_meaningless_option_is_refused_by_name(autods, model, tmp_path, fault):
    options, message = OPTIONS[fault]
    assert autods(model(GOOD), tmp_path / "out", *options) == 2
    assert is_one_message(autods.stderr, where="", message=message)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(autods, tmp_path):
    assert autods(tmp_path / "gone.py", tmp_path / "out") == 2
    assert is_one_message(autods.stderr, where=f"{tmp_path}/gone.py: ", message="No such file")


def test_an_output_folder_that_cannot_be_made_is_named(autods, model, tmp_path):
    (tmp_path / "file").write_text("")
    assert autods(model(GOOD), tmp_path / "file" / "out") == 2
    assert is_one_message(autods.stderr, where=f"{tmp_path}/file/out: ", message="cannot be written")


def test_a_corrupt_journal_is_named_with_its_line(autods, model, tmp_path):
    out = tmp_path / "out"
    assert autods(model(GOOD), out) == 0
    (out / "report.json").unlink()
    rows = (out / "journal.jsonl").read_text().splitlines()
    (out / "journal.jsonl").write_text("\n".join([*rows[:2], "garbage", *rows[3:], ""]))
    assert autods(model(GOOD), out) == 2
    assert is_one_message(autods.stderr, where=f"{out}/journal.jsonl:3: ", message="is damaged")
    assert "--fresh" in autods.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_is_named(autods, model, small_disk):
    with contextlib.suppress(OSError), open(small_disk / "filler", "wb") as file:
        file.write(bytes(2**23))
    assert autods(model(GOOD), small_disk / "out") == 2
    assert is_one_message(autods.stderr, where=f"{small_disk}/out", message="the disk is full")


def test_a_fit_goes_on_after_a_disk_filled_up_in_a_trial(autods, model, small_disk):
    filler = small_disk / "filler"
    path = model(FILLING.replace("FILLER", str(filler)))
    assert autods(path, small_disk / "out") == 2
    assert is_one_message(autods.stderr, where=f"{small_disk}/out", message="the disk is full")
    filler.unlink()
    filler.symlink_to("/dev/full")
    assert autods(path, small_disk / "out") == 0


@pytest.mark.parametrize("free_bytes", [2**20 + 2**14, 2**20 + 2**17])
def test_a_disk_that_fills_up_between_trials_is_named(autods, model, small_disk, free_bytes):
    stat = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(stat.f_bavail * stat.f_frsize - free_bytes))
    assert autods(model(TALKING), small_disk / "out", "--ladder", "zero1") == 2
    assert is_one_message(autods.stderr, where=f"{small_disk}/out", message="the disk is full")
