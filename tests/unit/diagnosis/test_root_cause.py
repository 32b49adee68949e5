"""`autods.diagnose` on the corpus and on what is no log at all."""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

import pytest

import autods
from autods.cli.main import main
from autods.errors import InputError

sys.path.insert(0, str(Path(__file__).parents[2] / "corpus"))
from cases import Case, load, split

from tests.support.user_errors import generate_user_errors

pytestmark = pytest.mark.timeout(120)  # reads the whole corpus

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"


def answer(case: Case) -> autods.Diagnosis:
    log = next(iter(case.files.values())) if len(case.files) == 1 else case.files
    return autods.diagnose(log, case.exit_code)


@pytest.fixture(scope="module")
def answers() -> list[tuple[Case, autods.Diagnosis]]:
    parts = split(load())
    return [(case, answer(case)) for case in (*parts["dev"], *parts["holdout"])]


def share(right: list[bool]) -> float:
    return sum(right) / len(right)


def test_the_corpus_is_large(answers: list[tuple[Case, autods.Diagnosis]]) -> None:
    assert len(answers) >= 150


@pytest.mark.parametrize(("what", "least"), [("kind", 0.98), ("action", 0.98), ("tier", 0.98)])
def test_the_corpus_is_diagnosed_right(answers: list[tuple[Case, autods.Diagnosis]], what: str, least: float) -> None:
    parts = split(case for case, _ in answers)
    dev, holdout = parts["dev"], parts["holdout"]
    wrong = [(case.group, case.name) for case, said in answers if getattr(said, what) != getattr(case, what)]
    known = {(case.group, case.name) for case in dev}
    of_dev = [name for name in wrong if name in known]
    assert 1 - len(of_dev) / len(dev) >= least, of_dev
    assert 1 - (len(wrong) - len(of_dev)) / len(holdout) >= 0.95, "holdout: names are not shown"


def test_nothing_that_is_not_memory_is_called_device_memory(answers: list[tuple[Case, autods.Diagnosis]]) -> None:
    others = [(case, said) for case, said in answers if case.kind not in ("out_of_memory", "memory_pressure")]
    assert sum((said.kind, said.tier) == ("out_of_memory", "device") for _, said in others) == 0


def test_fragmentation_is_reported_with_its_setting() -> None:
    idle = "60.00 GiB is allocated by PyTorch, and 9.00 GiB is reserved by PyTorch but unallocated."
    said = autods.diagnose(f"{OOM} of which 1.00 GiB is free. Of the allocated memory {idle}")
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said.advice
    assert said.evidence[0].startswith("torch.OutOfMemoryError")


def test_the_line_that_reports_an_exit_is_shown_once() -> None:
    line = "failed (exitcode: -9) local_rank: 0 (pid: 438) of binary: /opt/bin/python"
    said = autods.diagnose(f"E0910 20:17:59.100000 10 torch/distributed/elastic/multiprocessing/api.py:869] {line}\n")
    assert said.evidence == (line,)


def test_a_bare_sigkill_is_unknown_and_names_dmesg() -> None:
    for code in (-9, 137):
        said = autods.diagnose("", exit_code=code)
        assert (said.kind, said.action) == ("unknown", "retry")
        assert "dmesg" in said.advice


@pytest.mark.parametrize(
    ("percents", "kind"),
    [((4.2, 97.6), "out_of_memory"), ((84.6,), "out_of_memory"), ((95.0, 17.6), "unknown"), ((8.0,), "unknown")],
)
@pytest.mark.parametrize("repeats", [1, 30])
def test_deepspeeds_line_on_host_memory_explains_a_sigkill(
    percents: tuple[float, ...], kind: str, repeats: int
) -> None:
    prefix = "[2024-01-22 16:50:44,316] [INFO] [utils.py:799:see_memory_usage] "
    lines = [f"{prefix}CPU Virtual Memory:  used = 26.4 GB, percent = {percent}%" for percent in percents]
    log = "\n".join([lines[0]] * repeats + lines) + "\n"
    killed = "[ERROR] [launch.py:321:sigkill_handler] ['python', '--local_rank=0'] exits with return code = -9\n"
    said = autods.diagnose(log + killed)
    assert (said.kind, said.tier) == (kind, "host" if kind == "out_of_memory" else None)
    assert any(f"percent = {percents[-1]}%" in line for line in said.evidence) == (kind == "out_of_memory")
    assert autods.diagnose(log, 0).kind == "none"


def test_source_code_in_a_traceback_is_no_evidence() -> None:
    frames = '  File "t.py", line 3, in <module>\n    raise torch.cuda.OutOfMemoryError('
    assert autods.diagnose(f"Traceback (most recent call last):\n{frames}\nKeyError: 3\n").kind == "user_code"


def test_a_survived_failure_is_not_the_cause() -> None:
    steps = "\n".join(f"step {n} loss 2.{n}" for n in range(20))
    said = autods.diagnose(
        f"{OOM}\n{steps}\nTraceback (most recent call last):\n  File \"t.py\", line 1, in f\nKeyError: 'x'\n"
    )
    assert said.kind == "user_code"
    assert autods.diagnose(f"{OOM}\n{steps}\n", exit_code=0).kind == "memory_pressure"


def test_the_rank_whose_file_has_the_cause_is_named(tmp_path: Path) -> None:
    peer = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:36142"
    for rank, text in enumerate((peer, peer, OOM, peer)):
        (tmp_path / f"rank_{rank}.log").write_text(text)
    said = autods.diagnose(tmp_path)
    assert (said.kind, said.tier, said.rank) == ("out_of_memory", "device", 2)


def test_other_encodings_and_gzip_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(OOM.encode("utf-16"))
    (tmp_path / "b.log.gz").write_bytes(gzip.compress(OOM.encode()))
    for path in tmp_path.iterdir():
        assert autods.diagnose(path).tier == "device", path


@pytest.mark.parametrize("text", ["", "\0\1\2" * 500, "x" * 3_000_000, "\n" * 1000, "héllo wörld\n" * 100])
def test_nonsense_is_never_called_a_failure(text: str) -> None:
    assert autods.diagnose(text).kind in ("none", "unknown")


def test_an_unreadable_path_is_an_input_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="no such file"):
        autods.diagnose(tmp_path / "none.log")
    (tmp_path / "empty").mkdir()
    binary = tmp_path / "model.bin"
    binary.write_bytes(bytes(range(256)) * 64)
    for argument in (str(tmp_path / "none.log"), str(tmp_path / "empty"), str(binary)):
        assert main(["diagnose", argument]) == 2
        assert 1 <= len(capsys.readouterr().err.splitlines()) <= 2
    assert main(["diagnose"]) == 2


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"[rank3]: {OOM}\n")
    assert main(["diagnose", str(log)]) == 0
    assert "Out of device memory on rank 3" in capsys.readouterr().out
    assert main(["diagnose", str(log), "--exit-code", "1", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["kind"], said["tier"], said["rank"], said["action"]) == ("out_of_memory", "device", 3, "leaner_rung")


def raised(what: str, code: str = "x = batch['labels']") -> str:
    return f'Traceback (most recent call last):\n  File "/work/train.py", line 9, in step\n    {code}\n{what}\n'


def test_an_oom_kill_of_another_program_is_not_the_cause() -> None:
    dmesg = "[81.2] Out of memory: Killed process 2211 (mysqld) total-vm:8123321kB, anon-rss:4002312kB\n"
    assert autods.diagnose(raised("KeyError: 'labels'") + dmesg, 1).kind == "user_code"
    assert autods.diagnose(raised("KeyError: 'labels'") + dmesg.replace("mysqld", "python3"), 1).tier == "host"


def test_incidental_mention_of_oom_yields_to_the_scripts_exception() -> None:
    line = "[sweep] the trial before ended with CUDA out of memory\n"
    assert autods.diagnose(line + raised("KeyError: 'labels'"), 1).kind == "user_code"
    assert autods.diagnose(raised("KeyError: 'x'") + raised(OOM, "loss.backward()"), 1).tier == "device"


def test_a_scripts_own_error_about_memory_is_user_code() -> None:
    own = raised("ValueError: 131072 tokens would run out of GPU memory", "raise ValueError(")
    assert autods.diagnose(own, 1).action == "fix_code"


def test_text_after_a_progress_bar_is_read() -> None:
    bar = " 42%|████▏     | 84/200 [01:10<01:37,  1.19it/s]"
    assert autods.diagnose(bar + "Killed\n").kind == "unknown"
    glued = "[rank3]: " + bar + raised(OOM, "loss.backward()").replace("\n", "\n[rank3]: ")
    assert (autods.diagnose(glued, 1).tier, autods.diagnose(glued, 1).rank) == ("device", 3)
    without_percents = "12/90 [01:10<01:37, lr=['0.1'], loss=2]" + raised(OOM, "loss.backward()")
    assert autods.diagnose(without_percents).tier == "device"


def test_mpirun_sentence_over_two_lines_gives_the_rank() -> None:
    said = "mpirun noticed that process rank 7 with PID 0 on node n4 exited on\nsignal 9 (Killed).\n"
    found = autods.diagnose(said, 137)
    assert (found.kind, found.rank) == ("unknown", 7)


def test_words_of_rules_raised_by_users_code_are_user_code() -> None:
    errors = list(generate_user_errors(60, seed=21))
    answers = [autods.diagnose(error.log, 1) for error in errors]
    right = [
        said.kind == "user_code" and said.places == (f"line {error.line}",)
        for error, said in zip(errors, answers, strict=True)
    ]
    assert share(right) >= 0.97


def test_a_librarys_sentence_that_the_script_passes_on_counts() -> None:
    sentence = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
    own = raised(f"RuntimeError: worker 3 failed: {sentence}", "raise RuntimeError(f'worker {n} failed: {error}')")
    assert autods.diagnose(own, 1).tier == "device"


@pytest.mark.parametrize("path", ["/opt/v/lib/python3.11/site-packages/x/y.py", "/src/deepspeed/runtime/engine.py"])
def test_a_librarys_raise_is_not_the_users(path: str) -> None:
    log = raised("AssertionError: More elements 151060480 than buffer size 100000000", "raise AssertionError(")
    assert autods.diagnose(log, 1).kind == "user_code"
    assert autods.diagnose(log.replace("/work/train.py", path), 1).kind == "config"


@pytest.mark.parametrize("exit_code", [-40, 168, 296])
def test_a_real_time_signal_is_named(exit_code: int) -> None:
    said = autods.diagnose("", exit_code)
    assert (said.kind, said.signature) == ("unknown", "exit code -40")
    assert said.advice.startswith("ended by SIGRTMIN+6")
    assert said.evidence == (f"exit code {exit_code} (SIGRTMIN+6)",)


def test_a_caught_shortage_and_the_later_death_are_both_said() -> None:
    log = "| WARNING: ran out of memory, skipping batch\n"
    said = autods.diagnose(log + raised("AttributeError: 'NoneType' object has no attribute 'backward'"), 1)
    assert (said.kind, said.tier) == ("out_of_memory", "device")
    assert "ran out of memory" in said.evidence[0]
    assert "'NoneType' object has no attribute 'backward'" in said.notes[0]


def test_a_caught_shortage_explains_a_traceback_that_was_cut() -> None:
    log = "| WARNING: attempting to recover, ran out of memory\n" + raised("").rstrip("\n")
    said = autods.diagnose(log, 1)
    assert (said.kind, said.tier) == ("out_of_memory", "device")
    assert "ran out of memory" in said.evidence[0]


def test_a_shortage_that_a_warning_mentions_last_counts() -> None:
    warning = (
        "2026-01-05 10:00:00 | WARNING | trainer | caught: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0)\n"
    )
    said = autods.diagnose(warning)
    assert (said.kind, said.tier) == ("out_of_memory", "device")
    trained_on = warning + "".join(f"step {n} loss 2.1\n" for n in range(9))
    assert autods.diagnose(trained_on).kind == "memory_pressure"
    assert (
        autods.diagnose(warning + raised("ValueError: no labels", "raise ValueError('no labels')"), 1).kind
        == "user_code"
    )


def test_a_card_with_most_of_it_free_is_not_called_full() -> None:
    free = f"{OOM} of which 76.00 GiB is free."
    assert autods.diagnose(raised(free, "y = x.cuda()"), 1).action == "fix_environment"
    limited = f"{free} 8.00 GiB allowed; Of the allocated memory 7.50 GiB is allocated by PyTorch."
    assert autods.diagnose(raised(limited, "y = x.cuda()"), 1).tier == "device"


HIP = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate {} GPU 0 has a total capacity of 63.98 GiB of which"


@pytest.mark.parametrize(
    ("wanted", "free", "tier"),
    [
        ("4 bytes.", "62.01 GiB", None),
        ("512 bytes.", "12.31 GiB", None),
        ("2.00 MiB.", "20.60 GiB", None),
        ("2.00 MiB.", "12.00 MiB", "device"),
        ("4 bytes.", "0 bytes", "device"),
        ("2.00 GiB.", "3.00 GiB", "device"),
    ],
)
def test_a_few_bytes_refused_beside_gigabytes_are_no_full_card(wanted: str, free: str, tier: str | None) -> None:
    said = autods.diagnose(raised(f"{HIP.format(wanted)} {free} is free.", "y = x.cuda()"), 1)
    assert (said.kind, said.tier) == ("out_of_memory" if tier else "infrastructure", tier)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("deepspeed/runtime/zero/partition_parameters.py", "RuntimeError: expected param 7 to be available"),
        ("deepspeed/runtime/pipe/engine.py", "deepspeed.runtime.pipe.engine.PipelineError: Only train_batch() here"),
        ("accelerate/accelerator.py", "AssertionError: one `Accelerator()` has one model"),
        ("torch/distributed/fsdp/_flat_param.py", "ValueError: Must flatten tensors with uniform dtype"),
        (
            "torch/utils/checkpoint.py",
            "torch.utils.checkpoint.CheckpointError: A different number of tensors was saved",
        ),
    ],
)
@pytest.mark.parametrize("code", ["raise ValueError(", "assert ready, (", ""])
def test_what_the_training_library_raises_is_not_the_scripts(path: str, message: str, code: str) -> None:
    log = raised(message, code).replace("/work/train.py", f"/opt/v/lib/python3.11/site-packages/{path}")
    said = autods.diagnose(log, 1)
    assert said.kind == "config"
    assert "your own files" not in said.advice


@pytest.mark.parametrize(
    "message",
    [
        "AttributeError: 'DeepSpeedEngine' object has no attribute 'generate_all'",
        "AssertionError: loss must be a scalar tensor",
        "ValueError: Training data must be a torch Dataset",
    ],
)
def test_what_the_script_gave_to_the_library_stays_user_code(message: str) -> None:
    place = "/opt/v/lib/python3.11/site-packages/deepspeed/runtime/engine.py"
    assert autods.diagnose(raised(message, "raise Error(").replace("/work/train.py", place), 1).kind == "user_code"


@pytest.mark.parametrize("prompt", ["", "+ ", "(env) me@node:~/run$ ", "/opt/conda/bin/"])
def test_a_command_that_a_shell_shows_is_no_cause(prompt: str) -> None:
    command = f"{prompt}deepspeed train.py --encoder both --deepspeed-config ./ds_config.json"
    killed = "[ERROR] [launch.py:321:sigkill_handler] ['python'] exits with return code = -11"
    assert autods.diagnose(f"{command}\n{killed}\n").kind == "unknown"


def test_the_remedy_that_nccl_names_is_quoted() -> None:
    remedy = "Do not force-enable NVLS (NCCL_NVLS_ENABLE=1) if you wish to avoid this error in the future."
    warning = "node-1:8:9 [3] transport/nvls.cc:254 NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory"
    said = autods.diagnose(f"{warning} of size 16777216\n{remedy}\n", 1)
    assert remedy in said.advice


def test_an_exception_inside_a_ray_task_is_still_the_users() -> None:
    quoted = '  File "/work/data.py", line 7, in check\n    raise RuntimeError("could not allocate GPU memory bank")'
    task = f"ray.exceptions.RayTaskError(RuntimeError): ray::train() (pid=812, ip=127.0.0.1)\n{quoted}"
    log = f"{task}\nRuntimeError: could not allocate GPU memory bank"
    assert autods.diagnose(raised(log, "ray.get(result)"), 1).kind == "user_code"


def test_a_line_that_repeats_the_users_exception_is_no_cause() -> None:
    own = raised("RuntimeError: connection closed by peer list", "raise RuntimeError(message)")
    for log in (
        f"ERROR: connection closed by peer list\n{own}",
        f"{own}ERROR: failed: connection closed by peer list\n",
    ):
        assert autods.diagnose(log, 1).kind == "user_code"


def test_a_traceback_in_one_line_is_unfolded() -> None:
    frames = 'File "train.py", line 9, in <module> main() File "/work/data.py", line 25, in check'
    end = 'raise ValueError("buffer_size is " + n) ValueError: buffer_size is 3'
    log = f"Traceback (most recent call last): {frames} {end}"
    said = autods.diagnose(log, 1)
    assert (said.kind, said.evidence[0]) == ("user_code", "ValueError: buffer_size is 3")


def test_blanks_after_a_tracebacks_header_cost_no_time() -> None:
    began = time.process_time()
    for text in ("", 'File "train.py", line 9, in main', 'File "train.py", line 9, in main ' + "Aa." * 2000):
        autods.diagnose(f"Traceback (most recent call last): {text}{' ' * 20_000}x\n")
    assert time.process_time() - began < 1


@pytest.mark.parametrize("place", ["Cell In[4], line 3, in check(x)", "File /work/data.py:3, in check(x)"])
def test_a_notebooks_traceback_shows_who_raised(place: str) -> None:
    head = "ValueError    Traceback (most recent call last)\nCell In[5], line 12\n---> 12 check(x)"
    code = "      2     if x:\n----> 3         raise ValueError('could not open store')"
    said = autods.diagnose(f"{head}\n\n{place}\n{code}\n\nValueError: could not open store\n", 1)
    assert (said.kind, said.evidence[0]) == ("user_code", "ValueError: could not open store")


def test_a_notebooks_header_names_the_exception_of_a_cut_traceback() -> None:
    head = "OutOfMemoryError       Traceback (most recent call last)\nCell In[5], line 12\n---> 12 trainer.train()\n"
    said = autods.diagnose(head)
    assert (said.kind, said.tier) == ("out_of_memory", "device")


def test_a_warning_of_lost_connections_counts_where_nothing_else_does() -> None:
    warning = "WARNING:elastic.rendezvous:no heartbeat reached the rendezvous: RendezvousConnectionError\n"
    assert autods.diagnose(warning * 3).kind == "communication"
    assert (
        autods.diagnose(warning + raised("ValueError: no labels", "raise ValueError('no labels')"), 1).kind
        == "user_code"
    )
    assert autods.diagnose("WARNING: could not load libcudart.so.11: no such file\n").kind == "none"


def test_an_exception_that_is_printed_as_its_repr_is_known() -> None:
    said = autods.diagnose("MisconfigurationException(\"the strategy 'fast' does not exist\")\n")
    assert said.kind == "config"


WORKER_GONE = "(raylet) A worker died or was killed while executing a task by an unexpected system error."


@pytest.mark.parametrize("last", [WORKER_GONE, "RuntimeError: The inner error is reported as above."])
def test_a_lost_peer_says_more_than_a_death_without_a_reason(last: str) -> None:
    watchdog = "[E ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=26)"
    assert autods.diagnose(f"{watchdog}\n{last}\n").kind == "secondary"
    assert autods.diagnose(f"{last}\n").kind == "unknown"


def test_a_builds_echo_of_its_commands_is_no_failure() -> None:
    log = "[2/2] c++ flatten_unflatten.o -shared -lc10 -o utils.so\nLoading extension module utils...\n"
    assert autods.diagnose(log).kind == "none"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ('raise ValueError("Template {} does not exist.".format(data_args.template))', "config"),
        ('raise ValueError("Template {} does not exist.".format(name))', "user_code"),
    ],
)
def test_a_library_that_raises_a_settings_value_refuses_it(code: str, kind: str) -> None:
    frames = f'  File "/opt/venv/lib/python3.11/site-packages/tuner/data/template.py", line 302, in find\n    {code}\n'
    log = f"Traceback (most recent call last):\n{frames}ValueError: Template big does not exist.\n"
    assert autods.diagnose(log).kind == kind


@pytest.mark.parametrize(
    ("file", "kind"),
    [(r"D:\code\src\llamafactory\train\tuner.py", "config"), (r"D:\work\train.py", "user_code")],
    ids=["library", "script"],
)
def test_windows_paths_show_whose_file_raises(file: str, kind: str) -> None:
    code = 'raise ValueError(f"Unknown task: {args.stage}")'
    frame = f'  File "{file}", line 60, in run\n    {code}'
    log = f"Traceback (most recent call last):\n{frame}\nValueError: Unknown task: x\n"
    assert autods.diagnose(log).kind == kind


def test_a_workers_exit_after_a_finished_run_is_no_failure() -> None:
    notice = "(raylet) A worker died or was killed while executing a task by an unexpected system error. Exit code: 1."
    assert autods.diagnose(f"Training Progress: 100%|████| 9/9 [00:09<00:00]\n{notice}\n").kind == "none"
    assert autods.diagnose(f"Training Progress: 50%|██| 4/9 [00:04<00:05]\n{notice}\n").kind == "unknown"


def test_a_text_that_begins_after_an_empty_line_is_read() -> None:
    assert autods.diagnose("ValueError: \n\nmodel_type x is not registered. Choose from ['a', 'b']\n").kind == "config"


def test_an_allocation_that_failed_without_harm_is_pressure() -> None:
    warning = (
        "W tensorflow/core/bfc_allocator.cc:275] Allocator (GPU_0_bfc) ran out of memory trying to allocate 2.19GiB"
    )
    said = autods.diagnose(f"{warning}. The caller indicates that this is not a failure\nepoch 2 loss 0.3\n")
    assert (said.kind, said.tier) == ("memory_pressure", "device")


BARS = "Loading weights:   0%|          | 0/146 [00:00<?, ?it/s]\rLoading weights:  {percent}%|███▎  | 48/146\n"
SAVING = "[INFO|trainer.py:4100] 2026-11-28 03:11:05,812 >> Saving model checkpoint to out/checkpoint-30\n"
STEP = " 40%|████      | 40/100 [01:10<01:40,  1.7s/it]\n"
KERNEL = "Out of memory: Killed process 4242 (python) total-vm:99999kB, anon-rss:88888kB\n"


@pytest.mark.parametrize(
    ("log", "exit_code", "phase"),
    [
        (BARS.format(percent=33), -9, "load"),
        (BARS.format(percent=33) + KERNEL, None, "load"),
        (BARS.format(percent=100), -9, None),
        (BARS.format(percent=33) + "RuntimeError: no data here\n", 1, None),
        (STEP + SAVING, -9, "checkpoint"),
        (STEP + SAVING + STEP, -9, None),
        (SAVING + BARS.format(percent=33), -9, "load"),
        ("Saving checkpoints every 30 steps\n", -9, None),
    ],
)
def test_a_rank_killed_while_it_loads_or_saves_gets_that_advice(log: str, exit_code: int | None, phase: str) -> None:
    said = autods.diagnose(log, exit_code)
    assert said.phase == phase
    assert ("HfDeepSpeedConfig" in said.advice) is (phase == "load")
    assert ("zero_to_fp32" in said.advice) is (phase == "checkpoint")
    assert any("33%" in line for line in said.evidence) is (phase == "load")
    assert any("checkpoint-30" in line for line in said.evidence) is (phase == "checkpoint")
    assert said.tier == ("host" if KERNEL in log else None)


TIMEOUT = (
    "[rank5]:[E1128 03:11:05.812 ProcessGroupNCCL.cpp:688] [Rank 5] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=991, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600022 milliseconds\n"
)
CANCELLED = "slurmstepd: error: *** STEP 81234.0 ON node-17 CANCELLED AT 2026-11-28T03:12:01 ***\n"


@pytest.mark.parametrize(
    ("text", "kind"), [(TIMEOUT + CANCELLED, "secondary"), (CANCELLED + TIMEOUT, "infrastructure")]
)
def test_a_step_that_ends_after_a_timeout_was_not_cancelled(text: str, kind: str) -> None:
    assert autods.diagnose(text).kind == kind


def test_the_list_that_a_message_announces_is_evidence() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.11/site-packages/transformers/integrations/deepspeed.py", line 280, in finalize\n'
        "    raise ValueError(\n"
        "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:\n"
        "- ds train_micro_batch_size_per_gpu=4 vs hf per_device_train_batch_size=8\n"
    )
    assert (
        "ds train_micro_batch_size_per_gpu=4 vs hf per_device_train_batch_size=8" in autods.diagnose(text).evidence[1]
    )


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.2}",
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.2}",
        "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '1e-05', 'epoch': '0.2'}",
        "step 200 loss: tensor(nan, device='cuda:0')",
        " 12%|█▏ | 1211/10000 [12:01<1:27:12, 1.68it/s, loss=-inf]",
        " iteration 200/ 9000 | lm loss: NaN | grad norm: nan |",
    ],
)
def test_a_run_whose_last_loss_is_no_number_diverged(line: str) -> None:
    diagnosis = autods.diagnose(f"step 100 loss: 2.5\n{line}\nsaving model checkpoint\n")
    assert (diagnosis.signature, diagnosis.evidence) == ("user_code/not-a-number", (line.strip(),))
    assert autods.diagnose(f"{line}\nstep 300 loss: 2.4\n").kind == "none"


def test_the_mean_of_a_summary_is_not_the_last_loss() -> None:
    summary = "{'train_runtime': 12.0, 'train_steps_per_second': 1.0, 'train_loss': 0.7, 'epoch': 1.0}\n"
    steps = "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.2}\n", "{'loss': 0.7, 'grad_norm': 1.0, 'epoch': 0.2}\n"
    assert [autods.diagnose(step + summary).kind for step in steps] == ["user_code", "none"]


@pytest.mark.parametrize(("norms", "kind"), [(("nan",) * 3, "user_code"), (("nan", "0.9", "nan"), "none")])
def test_a_run_whose_last_gradients_are_no_numbers_diverged(norms: tuple[str, ...], kind: str) -> None:
    lines = [f"{{'loss': 1.6{step}, 'grad_norm': {norm}, 'epoch': 0.1}}\n" for step, norm in enumerate(norms)]
    assert autods.diagnose("".join(lines)).kind == kind


def test_memory_that_evaluation_fills_gets_that_advice() -> None:
    frame = '  File "/lib/transformers/trainer.py", line 4300, in evaluation_loop\n    logits = gather(logits)\n'
    said = autods.diagnose(f"Traceback (most recent call last):\n{frame}{OOM} of which 1.00 GiB is free.\n")
    assert (said.tier, said.phase) == ("device", "evaluation")
    assert "per_device_eval_batch_size" in said.advice


@pytest.mark.parametrize("prefix", ["", "[rank0]: ", "3: [rank3]: "])
def test_an_exception_whose_handling_ran_out_of_memory_is_named(prefix: str) -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 22, in main',
        "ValueError: Expected input batch_size (8) to match target batch_size (4).",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "/w/train.py", line 31, in save_debug',
        f"{OOM} of which 1.00 GiB is free.",
    ]
    said = autods.diagnose("".join(f"{prefix}{line}\n" for line in lines))
    assert said.tier == "device"
    assert [note for note in said.notes if "Expected input batch_size (8)" in note]
    assert not autods.diagnose("".join(f"{prefix}{line}\n" for line in lines[6:])).notes


def test_memory_that_saving_fills_gets_that_advice() -> None:
    frame = (
        '  File "/lib/deepspeed/runtime/engine.py", line 3800, in _zero3_consolidated_16bit_state_dict\n    gather()\n'
    )
    said = autods.diagnose(f"Traceback (most recent call last):\n{frame}{OOM} of which 1.00 GiB is free.\n")
    assert (said.tier, said.phase) == ("device", "checkpoint")
    assert "stage3_gather_16bit_weights_on_model_save" in said.advice


def test_an_npu_is_told_the_variable_of_its_allocator() -> None:
    sizes = "(NPU 0; 4.00 GiB already allocated; 9.00 GiB reserved in total by PyTorch)"
    said = autods.diagnose(f"RuntimeError: NPU out of memory. Tried to allocate 1.00 GiB {sizes}")
    assert "set PYTORCH_NPU_ALLOC_CONF=expandable" in said.advice


def test_advice_names_the_variable_that_torch_names() -> None:
    text = f"{OOM} of which 1.00 GiB is free. 2.50 GiB is reserved by PyTorch but unallocated. Try setting {{}}\n"
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert f"set {variable}=expandable" in autods.diagnose(text.format(variable)).advice


def test_after_the_trainers_last_metrics_a_trackers_error_counts_not() -> None:
    log = "{'train_runtime': 4110.2, 'train_loss': 1.31, 'epoch': 3.0}\nwandb: ERROR Error while calling W&B API: 500\n"
    assert autods.diagnose(log).kind == "none"


def test_a_bare_assertion_is_shown_with_its_statement() -> None:
    frame = '  File "/v/lib/python3.11/site-packages/deepspeed/runtime/pipe/engine.py", line 915, in _exec_send_grads'
    log = f"Traceback (most recent call last):\n{frame}\n    assert inputs.grad is not None\nAssertionError\n"
    assert autods.diagnose(log).evidence == ("AssertionError", "assert inputs.grad is not None")


def test_a_full_device_that_native_code_reports_is_the_cause() -> None:
    log = """\
(LLMRayActor pid=347862) CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62
Traceback (most recent call last):
  File "/work/train_ppo.py", line 478, in <module>
    train(args)
ray.exceptions.RayTaskError(AssertionError): ray::ActorModelRayActor.fit() (pid=348952, ip=10.0.0.1)
  File "/work/ppo_actor.py", line 300, in ppo_train
    batch_vllm_engine_call(self.vllm_engines, "wake_up")
AssertionError
"""
    assert (autods.diagnose(log).kind, autods.diagnose(log).tier) == ("out_of_memory", "device")


def test_what_a_native_exception_says_is_read_before_the_abort() -> None:
    log = """\
terminate called after throwing an instance of 'std::runtime_error'
  what():  NCCL Error 1: unhandled cuda error
Aborted (core dumped)
"""
    assert autods.diagnose(log).signature == "communication/unhandled-cuda-error"


def test_an_exception_that_python_ignored_is_no_failure() -> None:
    log = """\
Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f>
Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1478, in __del__
    self._shutdown_workers()
AssertionError: can only test a child process
"""
    assert autods.diagnose(log).kind == "none"


def test_a_collective_that_times_out_after_the_last_metrics_counts() -> None:
    log = """\
{'train_runtime': 811.0, 'train_loss': 0.6, 'epoch': 3.0}
[rank1]:[E601 11:41:11.123 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9912, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for 1800010 milliseconds before timing out.
"""  # noqa: E501
    assert autods.diagnose(log).kind == "secondary"


@pytest.mark.parametrize(("time", "kind"), [("10:05:00", "out_of_memory"), ("09:05:00", "memory_pressure")])
def test_another_ranks_later_failure_outweighs_a_good_end(time: str, kind: str) -> None:
    done = "[2026-01-05 10:00:00,000] [INFO] [launch.py:351:main] Process 812 exits successfully.\n"
    failed = (
        f"[2026-01-05 {time},000] [ERROR] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    assert autods.diagnose({"rank0.log": done, "rank1.log": failed}).kind == kind


def test_a_failure_of_the_users_code_shows_the_users_frame() -> None:
    frames = 'File "/home/me/train.py", line 12, in step\n    loss = model(x).loss\n'
    library = 'File "/usr/lib/python3/site-packages/torch/nn/module.py", line 9, in call\n    return f()\n'
    log = f"Traceback (most recent call last):\n  {frames}  {library}AttributeError: 'Tensor' object has no 'loss'\n"
    evidence = autods.diagnose(log).evidence
    assert evidence == ("AttributeError: 'Tensor' object has no 'loss'", 'File "/home/me/train.py", line 12, in step')


@pytest.mark.parametrize(
    ("message", "rank"),
    [
        ("RuntimeError: disagreement between rank0 and rank7: rank0: [1], rank7: [2]", 7),
        ("ValueError: LoRA rank 128 is greater than max_lora_rank 16.", None),
        ("ValueError: expected a rank 3 tensor", None),
        ("RuntimeError: rank 3: the batch is empty", 3),
    ],
)
def test_the_rank_is_that_of_a_process(message: str, rank: int | None) -> None:
    assert autods.diagnose(message).rank == rank


def test_a_call_that_nccl_made_pinned_no_memory() -> None:
    text = (
        "ncclUnhandledCudaError: Call failed. Cuda failure 304 'OS call failed or operation not supported on this OS'"
    )
    assert autods.diagnose(f"torch.distributed.DistBackendError: {text}").tier is None


def test_the_failed_container_of_a_pod_decides() -> None:
    states = [
        {"terminated": {"exitCode": 0, "reason": "Completed"}},
        {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
    ]
    pod = {"status": {"containerStatuses": [{"name": "trainer", "state": state} for state in states]}}
    diagnosis = autods.diagnose(json.dumps(pod))
    assert (diagnosis.kind, diagnosis.tier) == ("out_of_memory", "host")


def test_what_a_native_exception_says_is_evidence() -> None:
    diagnosis = autods.diagnose(
        "terminate called after throwing an instance of 'c10::Error'\n  what():  the queue is gone"
    )
    assert (diagnosis.kind, diagnosis.evidence[-1]) == ("unknown", "what():  the queue is gone")


NO_ANSWER = """\
[rank9]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a \
network error, NCCL version 2.27.5
[rank9]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
[rank9]: Last error:
[rank9]: NET/IB: Got completion from peer 10.0.0.4<35432> with status=12 opcode=0 len=0 vendor err 129 (Recv) hca mlx5_3
"""


@pytest.mark.parametrize(
    ("beside", "kind", "rank"),
    [
        ("", "communication", None),
        ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB.\n", "out_of_memory", 0),
        ('[rank0]:   File "/w/train.py", line 3, in <module>\n[rank0]: KeyError: 7\n', "user_code", 0),
    ],
)
def test_no_answer_over_the_network_counts_if_nobody_failed(beside: str, kind: str, rank: int | None) -> None:
    for log in (NO_ANSWER + beside, beside + NO_ANSWER, {"a.log": NO_ANSWER, "b.log": beside}):
        found = autods.diagnose(log)
        assert (found.kind, found.rank) == (kind, rank)


def test_a_line_of_the_evidence_that_was_cut_ends_in_dots() -> None:
    line = autods.diagnose(f"{OOM} {'x' * 500}\n").evidence[0]
    assert line.startswith("torch.OutOfMemoryError")
    assert line.endswith("x…")
    assert len(line) == 400


AUTOTUNE = "E1122 10:00:00.000000 139 torch/_inductor/select_algorithm.py:5067] [0/0] "


@pytest.mark.parametrize(("end", "kind"), [(f"{OOM}\n", "out_of_memory"), ("", "none")])
def test_a_kernel_that_autotuning_rejects_is_no_failure(end: str, kind: str) -> None:
    said = (
        "Runtime error during autotuning: ",
        "No valid triton configs. OutOfMemoryError: out of resource: triton_mm",
    )
    log = "".join(f"{AUTOTUNE}{line}\n" for line in (*said, "Ignoring this choice."))
    assert autods.diagnose(log + end).kind == kind


@pytest.mark.parametrize(("ooms", "retries", "kind"), [(0, 0, "none"), (0, 3, "memory_pressure")])
def test_torchs_memory_summary_shows_retries_as_pressure(ooms: int, retries: int, kind: str) -> None:
    row = f"|            CUDA OOMs: {ooms}            |        cudaMalloc retries: {retries}         |\n"
    assert autods.diagnose(row).kind == kind


def test_a_row_of_a_gpu_that_was_remapped_is_not_the_cause() -> None:
    noted = "NVRM: Xid (PCI:0000:1a:00): 63, pid=9, name=python, Row Remapper: New row (0x1) marked for remapping\n"
    assert autods.diagnose(f"{noted}{OOM}\n").tier == "device"


@pytest.mark.parametrize(
    "harmless",
    [
        "[ 812.100000] pcieport 0000:40:01.0: AER: Corrected error received: 0000:40:01.0",
        "pcieport 0000:40:01.0: AER: Correctable error message received from 0000:41:00.0",
        "pcieport 0000:40:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
        "pcieport 0000:40:01.0:   device [8086:347a] error status/mask=00000001/00002000",
        "pcieport 0000:40:01.0:    [ 0] RxErr                  (First)",
        "{3}[Hardware Error]: It has been corrected by h/w and requires no further action",
        "mce: [Hardware Error]: Machine check events logged",
        "NVRM: Xid (PCI:0000:1a:00): 145, RLW_CTRL Nonfatal XC0 i0 Link 3 (0x00000004 0x0 0x0 0x0 0x0 0x0)",
        "NVRM: Xid (PCI:0000:1a:00): 45, pid=812, name=python3, Ch 00000008",
    ],
)
def test_errors_that_hardware_corrected_are_no_cause(harmless: str) -> None:
    assert autods.diagnose(f"{harmless}\n").kind == "none"
    assert autods.diagnose(f"{harmless}\n{OOM}\n").tier == "device"


@pytest.mark.parametrize(
    "fatal",
    [
        "pcieport 0000:40:01.0: AER: Uncorrected (Fatal) error received: 0000:41:00.0",
        "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: be00000000800400",
        "NVRM: Xid (PCI:0000:1a:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 03 (0x02500100 0x0 0x0 0x0 0x0 0x0)",
        "NVRM: Xid (PCI:0000:1a:00): 45, pid=812, name=python3, Ch 00000008 caused by previous Xid 149",
        "{2}[Hardware Error]: event severity: recoverable",
        "gpu 2: 12 correctable errors, 5 uncorrectable errors, row remapping failure",
        "gpu 2: non-correctable error, row remapping failure",
    ],
)
def test_errors_that_hardware_did_not_correct_are(fatal: str) -> None:
    assert autods.diagnose(f"{fatal}\n{OOM}\n").signature == "infrastructure/broken-gpu"


@pytest.mark.parametrize(
    "later",
    [
        'Traceback (most recent call last):\n  File "/w/score.py", line 7, in <module>\n    open("out/weights.json")\n'
        "FileNotFoundError: [Errno 2] No such file or directory: 'out/weights.json'\n",
        "slurmstepd: error: *** STEP 71.0 ON node-2 CANCELLED AT 2026-03-01T08:00:00 ***\n",
    ],
)
def test_what_follows_a_missing_launcher_is_no_cause(later: str) -> None:
    diagnosis = autods.diagnose(f"job.sh: line 12: deepspeed: command not found\n{later}", exit_code=1)
    assert diagnosis.signature == "toolchain/launcher-not-found"


@pytest.mark.parametrize(
    "line",
    [
        "Memory failure: 0x7a31c: Sending SIGBUS to python3:812 due to hardware memory corruption",
        "MCE: Killing python3:812 due to hardware memory corruption fault at 7f21c0de",
    ],
)
def test_a_broken_memory_module_is_not_a_full_dev_shm(line: str) -> None:
    killed = "RuntimeError: DataLoader worker (pid 812) is killed by signal: Bus error.\n"
    assert autods.diagnose(f"{line}\n").signature == "infrastructure/broken-memory"
    assert autods.diagnose(f"{line}\n{killed}").signature == "infrastructure/broken-memory"


@pytest.mark.parametrize(("count", "kind"), [(5, "infrastructure"), (0, "none")])
def test_counted_ecc_errors_are_a_cause_where_none_is_named(count: int, kind: str) -> None:
    table = f"    ECC Errors\n        Volatile\n            DRAM Uncorrectable : {count}\n"
    assert autods.diagnose(table).kind == kind
    assert autods.diagnose(f"{table}{OOM}\n").tier == "device"


@pytest.mark.parametrize(
    "line",
    [
        "/var/spool/slurmd/job101/slurm_script: line 12: module: command not found",
        "/bin/sh: 1: nvcc: not found",
        "libibverbs: Warning: couldn't load driver 'libhns.so': libhns.so: cannot open shared object file",
        "mca_base_component_repository_open: unable to open mca_x: a.so: cannot open shared object file (ignored)",
        "    ECC Errors",
        "slurmstepd: error: Exceeded step memory limit at some point.",
    ],
)
def test_what_runs_go_on_after_does_not_hide_the_cause(line: str) -> None:
    assert autods.diagnose(f"{line}\n{OOM}\n").signature == "device/allocator"


def test_a_network_link_that_is_down_is_no_broken_gpu() -> None:
    assert autods.diagnose("mlx5_core 0000:1a:00.0 eth2: Link down\n").kind == "communication"


NUMPY = (
    "A module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.3.0 as it may crash.\n\n"
    'Traceback (most recent call last):  File "/env/bin/torchrun", line 8, in <module>\n'
    "    from torch.distributed.run import main\nAttributeError: _ARRAY_API not found\n"
)


@pytest.mark.parametrize(
    ("end", "signature"),
    [
        (f"{OOM}\n", "device/allocator"),
        ('Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    raise ValueError("no split")\n'
         "ValueError: no split\n", "user_code/any-exception"),
        ("", "toolchain/warning-of-another-numpy"),
        ('Traceback (most recent call last):\n  File "a.py", line 3, in <module>\n    import cv2\n'
         "ImportError: numpy.core.multiarray failed to import\n", "toolchain/shared-library"),
    ],
)  # fmt: skip
def test_numpys_warning_is_the_cause_where_no_other_is(end: str, signature: str) -> None:
    assert autods.diagnose(NUMPY + end).signature == signature


TORCHRUN = (
    "Root Cause (first observed failure):\n[0]:\n  rank      : 5 (local_rank: 5)\n  exitcode  : -9 (pid: 4121)\n"
    "  traceback : Signal 9 (SIGKILL) received by PID 4121\n"
)


@pytest.mark.parametrize(
    "follower",
    [
        "[rank1]: torch.distributed.DistNetworkError: The client socket has timed out\n",
        "RendezvousConnectionError: The connection to the C10d store has failed\n",
    ],
)
def test_a_killed_rank_outweighs_a_network_that_failed_then(follower: str) -> None:
    said = autods.diagnose(follower + TORCHRUN)
    assert (said.signature, said.rank) == ("exit code -9", 5)


def name_root(rank: int, code: int, time: str) -> str:
    """What torchrun of one node says at its end."""
    return (
        f"Root Cause (first observed failure):\n[0]:\n  time      : 2026-03-01_{time}\n  host      : node\n"
        f"  rank      : {rank} (local_rank: 4)\n  exitcode  : {code} (pid: {4000 + rank})\n  error_file: <N/A>\n"
    )


FAILED, KILLED = name_root(12, 1, "12:00:05"), name_root(5, -9, "12:00:06")


@pytest.mark.parametrize("log", [FAILED + KILLED, KILLED + FAILED])
def test_a_killed_root_of_two_nodes_is_the_first(log: str) -> None:
    said = autods.diagnose(f"[rank12]: torch.distributed.DistNetworkError: The client socket has timed out\n{log}")
    assert (said.signature, said.rank) == ("exit code -9", 5)


def test_of_two_killed_roots_the_earlier_is_the_first() -> None:
    assert autods.diagnose(KILLED + name_root(9, -9, "12:00:02")).rank == 9


@pytest.mark.parametrize(
    "line",
    ["Worker process exited with code -9", "The replica workerpool0-0 exited with a non-zero status of 137."],
)
def test_the_sign_of_an_exit_code_is_read(line: str) -> None:
    assert autods.diagnose(f"{line}\n").signature == "exit code -9"
