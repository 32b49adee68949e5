"""A journal or report that is damaged or belongs to another fit is named with its line, and never trusted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from autods.cli.main import main
from tests.support.hostile import ON_MADE_UP_RANKS, Case

FIT = "fit model.py --device cpu --gpus 2 --gpu-memory 1GiB --config quick --ladder zero1 --out out --quiet"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished fit."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Case(FIT, 0).write_files(folder)
        assert main(FIT.split(), **ON_MADE_UP_RANKS) == 0
    return folder / "out"


def in_line(number: int, change: Callable[[str], str], name: str = "journal.jsonl") -> Damage:
    """Change one line of a file."""

    def damage(out: Path) -> None:
        lines = (out / name).read_text().split("\n")
        lines[number - 1] = change(lines[number - 1])
        (out / name).write_text("\n".join(lines))

    return damage


def in_row(number: int, change: Callable[[dict], object]) -> Damage:
    """Change the JSON of one line of the journal."""

    def edit(line: str) -> str:
        row = json.loads(line)
        change(row)
        return json.dumps(row)

    return in_line(number, edit)


def in_bytes(change: Callable[[bytes], bytes], name: str = "journal.jsonl") -> Damage:
    return lambda out: (out / name).write_bytes(change((out / name).read_bytes()))


def in_report(change: Callable[[dict], object]) -> Damage:
    def damage(out: Path) -> None:
        report = json.loads((out / "report.json").read_text())
        change(report)
        (out / "report.json").write_text(json.dumps(report))

    return damage


DAMAGED_LINES = {
    **{f"line {n}: words": (in_line(n, lambda _: "garbage"), n) for n in range(1, 6)},
    "line 2: empty": (in_line(2, lambda _: ""), 2),
    "line 2: a list": (in_line(2, lambda _: "[]"), 2),
    "line 2: nested a million times": (in_line(2, lambda _: "[" * 10**6), 2),
    "line 2: half of it": (in_line(2, lambda line: line[: len(line) // 2]), 2),
    "line 2: two in one": (in_line(2, lambda line: line + line), 2),
    "line 2: a kind of another version": (in_row(2, lambda row: row.update(kind="begun")), 2),
    "line 2: a key that is a number": (in_row(2, lambda row: row.update(key=5)), 2),
    "header: no fingerprint": (in_row(1, lambda row: row.pop("fingerprint")), 1),
    "header: memory in words": (in_row(1, lambda row: row.update(device_bytes="1GiB")), 1),
    "header: no version": (in_row(1, lambda row: row.pop("version")), 1),
    "UTF-16": (in_bytes(lambda text: text.decode().encode("utf-16")), 2),
    "record: no trial": (in_row(3, lambda row: row["record"].pop("trial")), 3),
    "record: a number in words": (in_row(3, lambda row: row["record"].update(seconds="long")), 3),
    "record: an unknown outcome": (in_row(3, lambda row: row["record"]["outcome"].update(kind="tired")), 3),
    "record: an unknown tier": (in_row(3, lambda row: row["record"]["outcome"].update(memory={"moon": {}})), 3),
    "record: a field of another version": (in_row(3, lambda row: row["record"].update(colour="red")), 3),
    "record: none": (in_row(3, lambda row: row.update(record=None)), 3),
}


def spoil(finished: Path, out: Path, damage: Damage, *, keep_report: bool = False) -> None:
    shutil.copytree(finished, out)
    if not keep_report:
        (out / "report.json").unlink()
    damage(out)


@pytest.mark.parametrize(("damage", "number"), DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_a_damaged_journal_is_named_with_its_line(meet, finished, tmp_path, damage, number):
    spoil(finished, tmp_path / "out", damage)
    ending = meet(Case(FIT, 2, f"out/journal.jsonl:{number}: is damaged", "made up"))
    assert "--fresh" in ending.stderr
    meet(Case(f"{FIT} --fresh", 0, "", "made up"))


OF_ANOTHER_FIT = {
    "an older version": in_row(1, lambda row: row.update(version=2)),
    "a later version": in_row(1, lambda row: row.update(version=99)),
    "another question": in_row(1, lambda row: row.update(fingerprint="0" * 16)),
}


@pytest.mark.parametrize("damage", OF_ANOTHER_FIT.values(), ids=OF_ANOTHER_FIT)
def test_a_journal_of_another_fit_is_refused(meet, finished, tmp_path, damage):
    spoil(finished, tmp_path / "out", damage)
    meet(Case(FIT, 2, "out/journal.jsonl: belongs to another fit", "made up"))


HARMLESS = {
    "nothing": lambda out: None,
    "the last line is torn": in_bytes(lambda text: text[:-40]),
    "zeros after a power cut": in_bytes(lambda text: text[:-40] + bytes(40)),
    "line ends of Windows": in_bytes(lambda text: text.replace(b"\n", b"\r\n")),
    "a mark at its beginning": in_bytes(lambda text: b"\xef\xbb\xbf" + text),
    "a record twice": in_line(3, lambda line: f"{line}\n{line}"),
    "an empty journal": in_bytes(lambda text: b""),
    "no journal": lambda out: (out / "journal.jsonl").unlink(),
    "half a study": in_bytes(lambda text: text[: len(text) // 2], "study.jsonl"),
    "no study": lambda out: [path.unlink() for path in out.glob("study.jsonl*")],
    "a study of bytes": in_bytes(lambda text: bytes(range(256)), "study.jsonl"),
}


@pytest.mark.parametrize("damage", HARMLESS.values(), ids=HARMLESS)
def test_what_a_crash_leaves_behind_is_gone_on_from(meet, finished, tmp_path, damage):
    spoil(finished, tmp_path / "out", damage)
    meet(Case(FIT, 0, "", "made up"))


IN_THE_REPORT = {
    "empty": in_bytes(lambda text: b"", "report.json"),
    "words": in_bytes(lambda text: b"garbage", "report.json"),
    "half of it": in_bytes(lambda text: text[: len(text) // 2], "report.json"),
    "a list": in_bytes(lambda text: b"[]", "report.json"),
    "nested a million times": in_bytes(lambda text: b"[" * 10**6, "report.json"),
    "no trials": in_report(lambda report: report.pop("trials")),
    "a number in words": in_report(lambda report: report.update(seconds="long")),
    "an unknown end": in_report(lambda report: report.update(status="tired")),
}


@pytest.mark.parametrize("damage", IN_THE_REPORT.values(), ids=IN_THE_REPORT)
def test_a_damaged_report_is_made_again_from_its_journal(meet, finished, tmp_path, damage):
    spoil(finished, tmp_path / "out", damage, keep_report=True)
    meet(Case(FIT, 0, "Use zero1, micro batch", "made up"))
    assert json.loads((tmp_path / "out" / "report.json").read_text())["status"] == "fit"


@pytest.mark.parametrize("damage", IN_THE_REPORT.values(), ids=IN_THE_REPORT)
def test_a_damaged_report_without_a_journal_is_named(meet, finished, tmp_path, damage):
    spoil(finished, tmp_path / "out", damage, keep_report=True)
    (tmp_path / "out" / "journal.jsonl").unlink()
    ending = meet(Case(FIT, 2, "out/report.json: ", "made up"))
    assert re.search(r"--fresh|another --out", ending.stderr)


def test_a_finished_fit_answers_its_own_question_alone(meet, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    meet(Case(f"{FIT} --seed 1", 2, "out/report.json: belongs to another fit", "made up"))
    meet(Case(FIT, 0, "zero1", "made up"))
