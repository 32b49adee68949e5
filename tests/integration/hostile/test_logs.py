"""diagnose: whatever a log holds, the answer is a diagnosis or one sentence, in text that no terminal obeys."""

from __future__ import annotations

import gzip
import json

from tests.support.hostile import Case, each

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB.\n"
TRACEBACK = (
    "Traceback (most recent call last):\n  File \"train.py\", line 3, in <module>\n    x = {}['a']\nKeyError: 'a'\n"
)
RECORD = json.dumps({"level": "error", "rank": 3, "message": OOM.strip(), "ts": "2026-01-01T00:00:00Z"}) + "\n"
DEVICE, CODE, NONE, NO_TEXT = (
    "Out of device memory",
    "The training code failed",
    "No failure was found",
    "is not a text",
)
BARS = "\r".join(f"{i}%|###| {i}/100 [00:01<00:02, 1.0it/s]" for i in range(100))


def log(content: str | bytes, message: str, options: str = "", code: int = 0) -> Case:
    return Case(f"diagnose run.log {options}", code, message, files={"run.log": content}, seconds=120)


def pipe(content: str | bytes, message: str, code: int = 0) -> Case:
    return Case("diagnose -", code, message, stdin=content)


NOTHING_IN_IT = {
    "empty": log("", "the log is empty"),
    "empty, and the run failed": log("", "The run failed", "--exit-code 1"),
    "one letter": log("x", NONE),
    "100,000 line ends": log("\n" * 10**5, NONE),
    "a megabyte of spaces": log(" " * 2**20, NONE),
    "a traceback without its end": log("Traceback (most recent call last):\n", NONE),
    "frames without an end": log(TRACEBACK.rpartition("KeyError")[0] * 2000, "a traceback without its end"),
    "a drawing in colours": log(("\x1b[2J\x1b[38;5;196m█\x1b[0m" * 50 + "\n") * 50, NONE),
    "half a record": log('{"level": "error", "message": "CUDA out of memory\n', NONE),
    "a record, nested 10,000 times": log('{"a":' * 10**4 + "}" * 10**4, NONE),
    "source code": log("raise torch.OutOfMemoryError('CUDA out of memory')\n", NONE),
    "an earlier failure that is quoted": log(f"INFO: a previous run failed with: {OOM}epoch 1 done\n", NONE),
    "a pipe of nothing": pipe(b"", "the log is empty"),
}
NOT_TEXT = {
    name: log(content, NO_TEXT, code=2)
    for name, content in {
        "NUL": bytes(10**5), "noise": bytes(range(256)) * 400, "UTF-16 without a mark": OOM.encode("utf-16-be"),
        "a program": b"\x7fELF" + bytes(range(256)) * 100, "a zip file": b"PK\3\4" + b"\0\1\2\3" * 500,
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 50, "gzip twice": gzip.compress(gzip.compress(b"x")),
    }.items()
} | {
    "a pipe of NUL": pipe(bytes(1000), NO_TEXT, 2),
    "gzip without its content": log(b"\x1f\x8b" + bytes(99), "is damaged", code=2),
}  # fmt: skip
FOUND = {
    "Latin-1": log(b"Fehler: \xfcber\n" + OOM.encode(), DEVICE),
    "UTF-16": log(OOM.encode("utf-16"), DEVICE),
    "a mark of UTF-8": log("\ufeff" + OOM, DEVICE),
    "three encodings": log(OOM.encode() + "日本\n".encode("shift-jis") + "über\n".encode("latin-1"), DEVICE),
    "surrogates": log("\udc80".encode("utf-8", "surrogatepass") + OOM.encode(), DEVICE),
    "line ends of Windows": log(TRACEBACK.replace("\n", "\r\n"), CODE),
    "line ends of old Macs": log(TRACEBACK.replace("\n", "\r"), CODE),
    "progress bars": log(f"{BARS}\n{OOM}", DEVICE),
    "colours": log("\x1b[31m" + OOM.replace("CUDA", "\x1b[1mCUDA\x1b[0m") + "\x1b[0m", DEVICE),
    "a title and a link": log(f"\x1b]0;title\x07\x1b]8;;http://x\x1b\\{OOM}", DEVICE),
    "controls of 8 bits": log(f"\x9b31m{OOM}", DEVICE),
    "a bell and a rubout": log(f"\x07\x08\x7f{OOM}", DEVICE),
    "text that turns": log(f"\u202e{OOM}", DEVICE),
    "markup of ours": log(f"[bold red]x[/] [/nope] {OOM}", DEVICE),
    "other line ends": log(f"a\x0bb\x0cc\x85d\u2028e{OOM}", DEVICE),
    "emoji": log(f"{'💥' * 1000}\n{OOM}", DEVICE),
    "JSON lines": log(RECORD * 3, "Out of device memory on rank 3"),
    "HTML": log(f"<html><body>{OOM}</body></html>", DEVICE),
    "a line of 20 MiB": log("x" * (20 * 2**20) + f"\n{OOM}", DEVICE),
    "at the end of a line of 1 MiB": log("x" * 2**20 + OOM, DEVICE),
    "the same 2,000 times": log(TRACEBACK * 2000, CODE),
    "tracebacks in one another": log(f"{TRACEBACK}\nDuring handling of the above exception, another\n\n" * 500, CODE),
    "a size of 400 digits": log(OOM.replace("2.00", "9" * 400), DEVICE),
    "a size that is no number": log(OOM.replace("2.00", "nan"), DEVICE),
    "gzip": log(gzip.compress(OOM.encode()), DEVICE),
    "gzip that was cut off": log(gzip.compress(OOM.encode() * 1000)[:-20], DEVICE),
    "a pipe": pipe(OOM, DEVICE),
    "a pipe of gzip": pipe(gzip.compress(OOM.encode()), DEVICE),
    "JSON is asked for": log(TRACEBACK, '"kind": "user_code"', "--json"),
    "killed, after it was done": log("Training finished\n", "The run failed", "--exit-code 137"),
    "memory ran short, and it ended well": log(OOM, "Memory was short, nothing failed", "--exit-code 0"),
}


@each(NOTHING_IN_IT)
def test_a_log_without_a_failure(meet, case):
    meet(case)


@each(NOT_TEXT)
def test_what_is_no_text_is_refused(meet, case):
    meet(case)


@each(FOUND)
def test_a_failure_is_found_in_odd_text(meet, case):
    meet(case)
