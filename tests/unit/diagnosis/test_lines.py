"""What a log's lines tell beside their words: who wrote them, when, and where one message ends."""

from __future__ import annotations

import json
import time

import pytest

import autods
from autods.diagnosis.lines import Reader, parse_clock, parse_record
from autods.diagnosis.messages import Assembler

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB. GPU {gpu} has a total capacity of 79 GiB"
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 8, in <module>\n    loss.backward()\n'
WAITED = "[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: ran for 600010 ms"


def test_a_json_record_gives_its_rank_and_its_traceback() -> None:
    log = json.dumps(
        {"ts": "2026-01-05T10:00:00Z", "level": "error", "rank": 9, "msg": "failed", "exc": TRACE + OOM.format(gpu=1)}
    )
    said = autods.diagnose(log)
    assert (said.kind, said.tier, said.rank) == ("out_of_memory", "device", 9)


def test_data_in_json_is_no_record() -> None:
    assert parse_record('{"question": "CUDA out of memory?", "answer": "a smaller batch"}') is None
    assert parse_record('{"loss": 2.1, "step": 4}') is None


def test_logfmt_is_read_as_a_record() -> None:
    found = parse_record('time=2026-01-05T10:00:00Z level=error rank=3 msg="no space left on device"')
    assert found is not None
    prefix, lines = found
    assert (prefix.rank, prefix.level, lines) == (3, "error", ["no space left on device"])


def test_a_containers_last_state_in_json_is_read() -> None:
    state = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "startedAt": "2026-01-05T10:00:00Z"}}}
    assert autods.diagnose(json.dumps(state), exit_code=137).tier == "host"


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ("2026-01-05 10:00:01,250 INFO", "2026-01-05T10:00:01,3 INFO"),
        ("[01/05/2026 23:59:59] step", "[01/06/2026 00:00:02] step"),
        ("Nov  5 10:00:01 host", "Nov 15 09:00:00 host"),
        ("E0505 12:00:00.123456 140 a.cc:1]", "W0505 12:00:00.2 141 b.cc:2]"),
        ("10:00:01 step", "10:00:02 step"),
    ],
)
def test_times_of_one_form_compare(early: str, late: str) -> None:
    times = parse_clock(early), parse_clock(late)
    assert times[0] is not None
    assert times[1] is not None
    assert times[0][0] == times[1][0]
    assert times[0] < times[1]


def test_a_line_without_a_time_has_none_and_forms_differ() -> None:
    assert parse_clock("step 4 loss 2.1") is None
    date, of_day = parse_clock("2026-01-05 10:00:01"), parse_clock("10:00:01 step")
    assert date is not None
    assert of_day is not None
    assert date[0] != of_day[0]


def test_the_first_failure_in_time_wins_across_files() -> None:
    late = f"2026-01-05 10:30:00 [rank0]: {OOM.format(gpu=0)}"
    early = f"2026-01-05 10:19:58 [rank9]: {OOM.format(gpu=1)}"
    assert autods.diagnose({"a.log": late, "b.log": early}).rank == 9


def test_a_text_made_of_several_files_is_taken_apart() -> None:
    log = f"==> rank_0.log <==\n{WAITED.format(rank=0)}\n==> rank_3.log <==\n{TRACE}KeyError: 'labels'\n"
    said = autods.diagnose(log)
    assert (said.kind, said.rank) == ("user_code", 3)
    assert said.places[0].startswith("rank_3.log")


def test_rays_list_of_processes_gives_the_rank() -> None:
    ranks = "\n".join(
        f"(TorchTrainer pid=9) - (ip=10.0.0.1, pid={100 + n}) world_rank={n}, local_rank={n}" for n in range(40)
    )
    error = "".join(f"(RayTrainWorker pid=137) {line}\n" for line in (TRACE + OOM.format(gpu=0)).splitlines())
    assert autods.diagnose(f"{ranks}\n{error}").rank == 37


def test_a_killed_pid_is_found_in_the_ranks_log() -> None:
    killed = "Out of memory: Killed process 4121 (python) total-vm:301221100kB, anon-rss:250118000kB"
    said = autods.diagnose({"rank_0.log": "pid 4120\nstep 1", "rank_1.log": "pid 4121\nstep 1", "dmesg.txt": killed})
    assert (said.kind, said.tier, said.rank) == ("out_of_memory", "host", 1)


def test_a_gpus_index_is_the_rank_on_one_host_only() -> None:
    one = "[launch.py:145:main] WORLD INFO DICT: {'localhost': [0, 1, 2, 3]}"
    two = "[launch.py:145:main] WORLD INFO DICT: {'node-1': [0, 1], 'node-2': [0, 1]}"
    assert autods.diagnose(f"{one}\n{TRACE}{OOM.format(gpu=2)}").rank == 2
    assert autods.diagnose(f"{two}\n{TRACE}{OOM.format(gpu=1)}").rank is None


def test_frames_in_a_box_are_a_stack() -> None:
    box = "│ /opt/deepspeed/cuda_accelerator.py:217 in pin_memory │\n│ ❱ 217 │   return tensor.pin_memory()   │\n"
    assert autods.diagnose(f"{box}RuntimeError: CUDA error: out of memory").tier == "pinned"


@pytest.mark.parametrize(
    ("margin", "rank"),
    [
        ("> ", None),
        ("    ", None),
        ("  [rank3]: ", 3),
        ("stderr: [rank3]: ", 3),
        ("[stderr]", None),
        ("stderr F ", None),
        ("[1,mpirank:3,algo-2]<stderr>:", 3),
        ("[36m(RayTrainWorker pid=88)[0m ", None),
        ("#033[31m", None),
        ("trainer  | ", None),
        ("host4 train.sh[881]: ", None),
        ("(VllmWorker rank=2 pid=3024) ERROR 03-20 03:14:59 [multiproc_executor.py:487] ", 2),
        ("(Worker_TP5 pid=9260) ERROR 12-13 11:54:35 [multiproc_executor.py:826] ", 5),
        ("[2025-12-13T19:54:35Z] (Worker_TP1_EP1 pid=92) ERROR 12-13 11:54:35 [gpu_worker.py:82] ", 1),
        ("(Worker_DP1_TP0_EP2 pid=92) ERROR 12-13 11:54:35 [multiproc_executor.py:826] ", 2),
        ("(Worker_PP1_TP0 pid=92) ERROR 12-13 11:54:35 [multiproc_executor.py:826] ", None),  # counts of their own
        ("(VllmWorker TP3 pid=92) ERROR 08-01 11:54:35 [multiproc_executor.py:511] ", 3),
        ("(VllmWorkerProcess pid=2421) ERROR 10-14 12:32:47 multiproc_worker_utils.py:233] ", None),
        ("log line {number}  ", None),
    ],
)
@pytest.mark.parametrize("intro", ["", "It fails with ZeRO-3:\n"])
def test_a_margin_of_any_kind_is_cut(margin: str, rank: int | None, intro: str) -> None:
    lines = (TRACE.replace("loss.backward()", "buffer.pin_memory()") + "RuntimeError: CUDA error: out of memory").split(
        "\n"
    )
    said = autods.diagnose(intro + "".join(f"{margin.format(number=9 + n)}{line}\n" for n, line in enumerate(lines)))
    assert (said.kind, said.tier, said.rank) == ("out_of_memory", "pinned", rank)


def test_a_traceback_that_lost_its_indents_keeps_its_frames() -> None:
    lines = (TRACE.replace("loss.backward()", "buffer.pin_memory()") + "RuntimeError: CUDA error: out of memory").split(
        "\n"
    )
    assert autods.diagnose("\n".join(line.lstrip() for line in lines)).tier == "pinned"


def test_a_traceback_without_its_end_is_a_failure_of_unknown_cause() -> None:
    said = autods.diagnose(f"step 1 loss 2.0\n{TRACE}")
    assert (said.kind, said.action) == ("unknown", "retry")


def test_an_announced_exception_is_the_cause() -> None:
    text = f"{TRACE}torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n{OOM.format(gpu=0)}"
    assert autods.diagnose(text).tier == "device"


def test_the_kernels_line_is_not_the_rest_of_an_exceptions_text() -> None:
    died = "RuntimeError: One of the subprocesses has abruptly died during map operation."
    killed = "kernel: [811.2] Out of memory: Killed process 40123 (python3) total-vm:91234567kB, anon-rss:88012345kB"
    assert autods.diagnose(f"{TRACE}{died}\n{killed}").tier == "host"


def test_an_argument_that_mentions_memory_is_no_shortage() -> None:
    said = autods.diagnose(
        f"{TRACE}ValueError: unknown value for --on-oom: 'CUDA out of memory' (choose from skip, abort)"
    )
    assert said.kind in ("user_code", "config")


def test_a_log_whose_lines_all_differ_is_read_in_part() -> None:
    lines = "".join(f"error {n:032x} while reading {n * 7919:x}\n" for n in range(30_000))
    taken = sum(1 for _ in Reader("").read([lines.encode()]))
    assert taken < 10_000


@pytest.mark.parametrize(
    "log", [f"error: bad payload {'ab12' * 15_000}\n", f"ValueError: bad\n{'1' * 60_000}\n", f"=={'a' * 60_000}\n"]
)
def test_a_line_of_60_kb_without_a_space_is_read_in_seconds(log: str) -> None:
    began_s = time.process_time()
    autods.diagnose(log)
    assert time.process_time() - began_s < 8


def test_repeated_lines_are_kept_while_a_traceback_is_open() -> None:
    opened: list[int] = []
    reader = Reader("", lambda: bool(opened))
    noise = b"retry 7 of the loader failed\n" * 50
    numbers = []
    for line in reader.read([noise + TRACE.encode(), noise]):
        numbers.append(line.number)
        opened += [line.number] if line.text.startswith("Traceback") else []
    assert numbers[:12] == list(range(1, 13))
    assert numbers[12:] == list(range(51, 104))


@pytest.mark.parametrize("end", ["\n", "\r"])
@pytest.mark.parametrize("text", ["RuntimeError: step {n}", TRACE.rstrip() + "\nValueError: {n}"])
def test_thousands_of_failures_are_read_in_part(text: str, end: str) -> None:
    assembler = Assembler()
    reader = Reader("", lambda: assembler.waiting)
    log = end.join(text.format(n=n).replace("\n", end) for n in range(20_000))
    taken = 0
    for line in reader.read([log.encode()]):
        taken += 1
        list(assembler.feed(line))
    assert taken < 10_000


def test_a_failure_at_the_end_of_much_noise_is_found() -> None:
    noise = "".join(f"2026-01-05 10:00:00 error {n:032x} while reading {n * 7919:x}\n" for n in range(10_000))
    said = autods.diagnose(f"{noise}[rank2]: {OOM.format(gpu=2)}\n", exit_code=1)
    assert (said.kind, said.tier, said.rank) == ("out_of_memory", "device", 2)


GROUP = """\
  + Exception Group Traceback (most recent call last):
  |   File "/work/launch.py", line 9, in run
  |     raise ExceptionGroup("shards failed", errors)
  | ExceptionGroup: shards failed (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/work/launch.py", line 5, in load
    |     return np.load(path)
    | numpy.core._exceptions._ArrayMemoryError: Unable to allocate 96.0 GiB for an array with shape (12884901888,)
    +---------------- 2 ----------------
    | ExceptionGroup: nested (1 sub-exception)
    +-+---------------- 1 ----------------
      | Traceback (most recent call last):
      |   File "/work/launch.py", line 7, in load
      |     rows = table["texts"]
      | KeyError: 'texts'
      +------------------------------------
"""


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
def test_the_parts_of_an_exception_group_are_read(prefix: str) -> None:
    said = autods.diagnose("".join(f"{prefix}{line}\n" for line in GROUP.splitlines()))
    assert (said.kind, said.tier, said.places) == ("out_of_memory", "host", ("line 9",))


def test_a_nested_group_of_the_users_exceptions_is_user_code() -> None:
    said = autods.diagnose(GROUP.replace("numpy.core._exceptions._ArrayMemoryError: Unable to allocate", "KeyError:"))
    assert (said.kind, said.places) == ("user_code", ("line 9",))


def test_a_time_before_many_failures_is_that_of_each() -> None:
    reader = Reader("train.log")
    lines = [b"2026-01-05 10:00:01 start", *[b"KeyError: %d" % number for number in range(300)]]
    found = [(line.number, reader.when(line.number)) for line in reader.read([b"\n".join(lines) + b"\n"])]
    assert {when for _, when in found} == {parse_clock("2026-01-05 10:00:01")}
    assert reader.when(290) is None  # earlier than the last look-up: searched again, 200 lines at most


VLLM_ENGINE = "INFO 03-02 19:49:01 llm_engine.py:234] Initializing a V0 LLM engine (v0.7.3) with config: model='/m', "


@pytest.mark.parametrize(
    ("engine", "failure", "rank"),
    [
        (f"{VLLM_ENGINE}tensor_parallel_size=4, pipeline_parallel_size=1, seed=0", "CUDA error: out of memory", 2),
        ("", OOM.format(gpu=2).partition(": ")[2], 2),
        ("", "CUDA error: out of memory", None),
        (f"{VLLM_ENGINE}tensor_parallel_size=8, pipeline_parallel_size=1, seed=0", "CUDA error: out of memory", None),
    ],
    ids=["by its place among the workers", "by its card", "no engine's line", "some workers said nothing"],
)
def test_a_worker_of_vllm_v0_has_its_rank(engine: str, failure: str, rank: int | None) -> None:
    said = (
        f"(VllmWorkerProcess pid={pid}) INFO 03-02 19:49:06 [utils.py:229] Worker ready; awaiting tasks"
        for pid in (93, 95, 97)
    )
    trace = (*TRACE.splitlines(), f"torch.OutOfMemoryError: {failure}")
    lines = (f"(VllmWorkerProcess pid=95) ERROR 03-02 19:49:43 [utils.py:242] {line}" for line in trace)
    assert autods.diagnose("\n".join((engine, *said, *lines))).rank == rank


def test_the_exception_that_sagemaker_quotes_is_read() -> None:
    log = """\
AlgorithmError: ExecuteUserScriptError:
ExitCode 1
ErrorMessage "RuntimeError: this instance type has no SMDDP"
Command "/opt/conda/bin/python3 train.py", exit code: 1
"""
    assert autods.diagnose(log).evidence == ('RuntimeError: this instance type has no SMDDP"',)
