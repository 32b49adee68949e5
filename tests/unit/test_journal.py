import itertools
import json
import math
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autods.errors import EnvironmentBroken, InputError
from autods.events import Note
from autods.journal import VERSION, Journal, TrialStore, record_warnings, trial_key
from autods.types import Action, Failed, Fit, Outcome, OutOfMemory, Record, Tier, Trial
from tests.support.journaled import FIT, TRIAL, record

OUT_OF_MEMORY = OutOfMemory(
    tier="device", rank=1, phase="backward", evidence="tried to allocate …", wanted_bytes=5, free_bytes=3, limit_bytes=9
)
FAILED = Failed(failure="unknown", rank=-1, phase="init", evidence="killed", action="retry", advice="look there")
OUTCOMES = [
    FIT,
    replace(FIT, tokens_per_second=800.0),
    OUT_OF_MEMORY,
    OutOfMemory(tier="nvme", rank=0, phase="step", evidence="e"),
    FAILED,
]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal.jsonl")


def written(journal: Journal) -> list[bytes]:
    """The lines of a journal with a header, one started and one finished trial."""
    journal.open(fingerprint="q")
    journal.write_start(TRIAL)
    journal.write_record(record())
    return journal.path.read_bytes().splitlines(keepends=True)


def refusal(journal: Journal) -> str:
    with pytest.raises(InputError) as caught:
        journal.open(fingerprint="q")
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_journal_touches_no_disk_until_it_is_opened(journal: Journal) -> None:
    assert not journal.path.exists()
    journal.open(fingerprint="q")
    assert journal.path.exists()


def test_a_new_journal_knows_nothing(journal: Journal) -> None:
    past = journal.open(fingerprint="q")
    assert (past.records, past.unfinished) == ({}, {})


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.kind)
def test_every_kind_of_outcome_comes_back_as_it_was(journal: Journal, outcome: Outcome) -> None:
    journal.open(fingerprint="q")
    journal.write_start(TRIAL)
    journal.write_record(record(outcome))
    assert journal.open(fingerprint="q").records == {trial_key(TRIAL): record(outcome)}


def test_a_loss_that_is_no_number_comes_back(journal: Journal) -> None:
    journal.open(fingerprint="q")
    journal.write_record(record(replace(FIT, losses=(math.nan, math.inf))))
    (found,) = journal.open(fingerprint="q").records.values()
    assert isinstance(found.outcome, Fit)
    assert math.isnan(found.outcome.losses[0])
    assert math.isinf(found.outcome.losses[1])


def test_a_trial_that_was_started_without_an_end_is_counted(journal: Journal) -> None:
    journal.open(fingerprint="q")
    journal.write_start(TRIAL)
    journal.write_start(TRIAL)
    assert journal.open(fingerprint="q").unfinished == {trial_key(TRIAL): 2}


def test_a_finished_trial_is_no_longer_unfinished(journal: Journal) -> None:
    written(journal)
    past = journal.open(fingerprint="q")
    assert past.unfinished == {}
    assert list(past.records) == [trial_key(TRIAL)]


@pytest.mark.parametrize("tier", ["shm", "nvme"])
def test_what_a_broken_machine_answered_is_asked_again(journal: Journal, tier: Tier) -> None:
    full = replace(OUT_OF_MEMORY, tier=tier, action="fix_environment")
    journal.open(fingerprint="f")
    journal.write_record(Record(id=1, trial=TRIAL, outcome=full, seconds=1.0))
    journal.write_record(Record(id=2, trial=replace(TRIAL, rung="ddp"), outcome=OUT_OF_MEMORY, seconds=1.0))
    assert [record.id for record in journal.open(fingerprint="f").records.values()] == [2]


@pytest.mark.parametrize("action", ["fix_code", "fix_config"])
def test_a_failure_that_may_be_fixed_by_now_runs_again(journal: Journal, action: Action) -> None:
    package = replace(FAILED, failure="user_code", action=action, evidence="ModuleNotFoundError: no module named 'x'")
    journal.open(fingerprint="f")
    journal.write_record(Record(id=1, trial=TRIAL, outcome=package, seconds=1.0))
    assert journal.open(fingerprint="f").records == {}


def test_a_refused_config_beside_one_that_fits_stays_refused(journal: Journal) -> None:
    journal.open(fingerprint="f")
    journal.write_record(Record(id=1, trial=TRIAL, outcome=replace(FAILED, action="fix_config"), seconds=1.0))
    journal.write_record(Record(id=2, trial=replace(TRIAL, rung="ddp"), outcome=FIT, seconds=1.0))
    assert [record.id for record in journal.open(fingerprint="f").records.values()] == [1, 2]


@pytest.mark.parametrize("size", [{"wants_larger_batch": True}, {"own_batch": 6}], ids=["too few", "the script's"])
def test_a_micro_batch_that_cannot_be_trained_is_tried_once(journal: Journal, size: dict[str, Any]) -> None:
    refused = replace(FAILED, action="fix_code", **size)
    journal.open(fingerprint="f")
    journal.write_record(Record(id=1, trial=TRIAL, outcome=refused, seconds=1.0))
    journal.write_record(Record(id=2, trial=replace(TRIAL, rung="ddp"), outcome=FIT, seconds=1.0))
    assert [record.id for record in journal.open(fingerprint="f").records.values()] == [1, 2]


def test_trials_that_ask_the_same_question_have_the_same_key() -> None:
    turned = dict(reversed(list(TRIAL.knobs.settings.items())))
    assert trial_key(TRIAL) == trial_key(replace(TRIAL, knobs=replace(TRIAL.knobs, settings=turned)))
    assert trial_key(TRIAL) != trial_key(replace(TRIAL, repeat=1))
    assert trial_key(TRIAL) != trial_key(replace(TRIAL, knobs=replace(TRIAL.knobs, micro_batch=5)))


def test_a_record_that_was_read_has_the_key_it_was_written_under(journal: Journal) -> None:
    written(journal)
    ((key, found),) = journal.open(fingerprint="q").records.items()
    assert trial_key(found.trial) == key


def test_the_journal_of_another_fit_is_refused_and_left_as_it_is(journal: Journal) -> None:
    journal.open(fingerprint="other")
    journal.write_start(TRIAL)
    before = journal.path.read_bytes()
    said = refusal(journal)
    assert "belongs to another fit" in said
    assert "--fresh" in said
    assert journal.path.read_bytes() == before


@pytest.mark.parametrize("version", [VERSION - 1, VERSION])
def test_another_fit_without_a_trial_is_no_obstacle(journal: Journal, version: int) -> None:
    journal.open(fingerprint="other", device_bytes=400)
    journal.write_warning("it was slow")
    lines = journal.path.read_text().replace(f'"version": {VERSION}', f'"version": {version}')
    journal.path.write_text(lines)
    past = journal.open(fingerprint="q", device_bytes=300)
    assert (past.device_bytes, past.warnings) == (300, [])
    assert journal.open(fingerprint="q", device_bytes=300) == past
    assert len(journal.path.read_text().splitlines()) == 1


def test_another_fit_whose_trials_failed_of_the_code_is_no_obstacle(journal: Journal) -> None:
    journal.open(fingerprint="other")
    journal.write_start(TRIAL)
    faulty = replace(FAILED, failure="user_code", action="fix_code", evidence="KeyError: 'labels'")
    journal.write_record(Record(id=1, trial=TRIAL, outcome=faulty, seconds=1.0))
    assert journal.open(fingerprint="q").records == {}
    assert len(journal.path.read_text().splitlines()) == 1


@pytest.mark.parametrize("kept", [1, 2])
def test_a_torn_last_line_loses_no_whole_line(journal: Journal, kept: int) -> None:
    lines = written(journal)
    for length in range(1, len(lines[kept])):  # every byte but the last
        journal.path.write_bytes(b"".join(lines[:kept]) + lines[kept][:length])
        past = journal.open(fingerprint="q")
        assert past.records == {}
        assert len(past.unfinished) == kept - 1
        assert journal.path.read_bytes() == b"".join(lines[:kept])


def test_a_journal_keeps_the_device_memory_of_its_first_run(journal: Journal) -> None:
    journal.open(fingerprint="q", device_bytes=400)
    journal.write_start(TRIAL)
    assert journal.open(fingerprint="q", device_bytes=500).device_bytes == 400


def test_a_torn_header_starts_the_journal_again(journal: Journal) -> None:
    header = written(journal)[0]
    journal.path.write_bytes(header[:20])
    assert journal.open(fingerprint="q").records == {}
    assert journal.path.read_bytes() == header


@pytest.mark.parametrize("torn", [b"\0\0\0\0", b'{"kind": "star\0\0\0'])
def test_zeros_that_a_power_cut_left_at_the_end_are_cut_off(journal: Journal, torn: bytes) -> None:
    whole = b"".join(written(journal))
    journal.path.write_bytes(whole + torn)
    assert len(journal.open(fingerprint="q").records) == 1
    assert journal.path.read_bytes() == whole


def test_what_is_appended_after_a_torn_line_can_be_read(journal: Journal) -> None:
    lines = written(journal)
    journal.path.write_bytes(b"".join(lines[:2]) + lines[2][:30])
    journal.open(fingerprint="q")
    journal.write_record(record(OUT_OF_MEMORY))
    (found,) = journal.open(fingerprint="q").records.values()
    assert found.outcome == OUT_OF_MEMORY


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "damage",
    [
        b"garbage\n",
        b"\n",
        b"[]\n",
        b"null\n",
        b"{}\n",
        b'{"kind": "dream"}\n',
        b"\xff\xfe\x00\x80\n",
        b"[" * 9999 + b"\n",
    ],
    ids=["garbage", "blank", "list", "null", "empty", "unknown kind", "binary", "deep"],
)
def test_a_damaged_line_is_named_by_its_number_and_nothing_is_changed(
    journal: Journal, number: int, damage: bytes
) -> None:
    lines = written(journal)
    lines[number - 1] = damage
    journal.path.write_bytes(b"".join(lines))
    said = refusal(journal)
    assert f"{journal.path}:{number}: is damaged" in said
    assert "--fresh" in said
    assert journal.path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("content", [b"\x89PNG\r\x1a\0", bytes(range(128, 256)), b"hello", b'{"name": "x"}'])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(journal: Journal, content: bytes) -> None:
    journal.path.write_bytes(content)
    assert f"{journal.path}:1: is damaged" in refusal(journal)
    assert journal.path.read_bytes() == content


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("key",), None),
        (("key",), 7),
        (("record",), None),
        (("record",), "x"),
        (("record", "id"), "three"),
        (("record", "seconds"), None),
        (("record", "trial"), {}),
        (("record", "trial", "rung"), 5),
        (("record", "trial", "rung"), "../../x"),
        (("record", "trial", "purpose"), "fun"),
        (("record", "trial", "limited"), 1),
        (("record", "trial", "knobs", "micro_batch"), 1.5),
        (("record", "trial", "knobs", "settings"), {"a": [1]}),
        (("record", "trial", "steps"), []),
        (("record", "trial", "extra"), 1),
        (("record", "outcome", "kind"), "miracle"),
        (("record", "outcome", "kind"), ["fit"]),
        (("record", "outcome", "kind"), "failed"),
        (("record", "outcome", "memory"), {"moon": {"peak_bytes": 1}}),
        (("record", "outcome", "memory", "device"), 5),
        (("record", "outcome", "step_s"), "0.1"),
        (("record", "outcome", "losses"), [None]),
        (("record", "outcome", "timing"), {}),
    ],
    ids=lambda part: ".".join(part) if isinstance(part, tuple) else repr(part),
)
def test_a_row_with_a_wrong_field_is_a_damaged_line(journal: Journal, path: tuple[str, ...], value: Any) -> None:
    lines = written(journal)
    row = json.loads(lines[2])
    place = row
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    journal.path.write_bytes(b"".join(lines[:2]) + json.dumps(row).encode() + b"\n")
    assert f"{journal.path}:3: is damaged" in refusal(journal)


@pytest.mark.parametrize("path", ["key", "record", "record.id", "record.trial.rung", "record.outcome.timing.wall_s"])
def test_a_row_that_lacks_a_field_is_a_damaged_line(journal: Journal, path: str) -> None:
    lines = written(journal)
    row = json.loads(lines[2])
    *parents, last = path.split(".")
    place = row
    for key in parents:
        place = place[key]
    del place[last]
    journal.path.write_bytes(b"".join(lines[:2]) + json.dumps(row).encode() + b"\n")
    assert f"{journal.path}:3: is damaged" in refusal(journal)


def test_a_journal_that_is_a_folder_is_refused(journal: Journal) -> None:
    journal.path.mkdir()
    assert "cannot be read: it is a folder" in refusal(journal)


def test_an_output_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    assert "Not a directory" in refusal(Journal(tmp_path / "out" / "journal.jsonl"))


def test_an_output_folder_that_is_missing_is_refused(tmp_path: Path) -> None:
    said = refusal(Journal(tmp_path / "out" / "journal.jsonl"))
    assert "cannot be written: No such file or directory" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; the read-only mount below covers it")
def test_an_output_folder_without_permission_is_refused(journal: Journal) -> None:
    journal.path.parent.chmod(0o500)
    try:
        assert "cannot be written: Permission denied" in refusal(journal)
    finally:
        journal.path.parent.chmod(0o700)


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A small tmpfs on `folder`; skips the test where mounting is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk is not allowed here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_disk_is_the_machines_fault(journal: Journal) -> None:
    with (
        mounted(journal.path.parent, "ro,size=64k"),
        pytest.raises(EnvironmentBroken, match=r"cannot be written: Read-only file system\n  mount it for writing"),
    ):
        journal.open(fingerprint="q")


def test_a_full_disk_is_said_and_leaves_whole_lines_only(journal: Journal) -> None:
    with mounted(journal.path.parent, "size=32k"):
        journal.open(fingerprint="q")
        with pytest.raises(
            EnvironmentBroken, match=r"cannot be written: No space left on device[\s\S]*free some space"
        ):
            write_for_ever(journal)
        lines = journal.path.read_bytes().splitlines(keepends=True)
        assert lines[-1].endswith(b"}\n")
        assert len(journal.open(fingerprint="q").records) == len(lines) - 1 > 10


def write_for_ever(journal: Journal) -> None:
    for number in itertools.count():
        journal.write_record(record(trial=replace(TRIAL, repeat=number)))


@pytest.mark.parametrize(("second", "action"), [("/m.py:3", "fix_code"), ("/m.py:4", "retry"), (None, "retry")])
def test_only_a_second_hang_at_the_same_line_is_the_codes(journal: Journal, second: str | None, action: str) -> None:
    places = iter(("/m.py:3", second))

    def execute(trial: Trial, id: int) -> Record:
        return record(replace(FAILED, hung_at=next(places)), trial)

    store = TrialStore(journal, journal.open(fingerprint="q"), execute, lambda event: None)
    first, again = store.run(TRIAL), store.run(replace(TRIAL, repeat=1))
    assert isinstance(first.outcome, Failed)
    assert isinstance(again.outcome, Failed)
    assert (first.outcome.action, again.outcome.action) == ("retry", action)


def test_a_warning_is_written_once_and_read_again(journal: Journal) -> None:
    journal.open(fingerprint="q")
    for _ in range(2):  # a fit, and its continuation
        known, events = list(journal.open(fingerprint="q").warnings), list[Note]()
        listen = record_warnings(events.append, known, journal.write_warning)
        for note in (Note(text="card 1 is throttled", warns=True), Note(text="starting Ray")):
            listen(note)
        assert [str(event) for event in events] == ["warning: card 1 is throttled", "starting Ray"]
    assert journal.open(fingerprint="q").warnings == ["card 1 is throttled"]
