"""Data are read strictly: what is missing, unknown or of another type is named with its dotted place."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from typing import Any

import pytest

from autods.config.deepspeed import merge, nest_key
from autods.schema import read_as, read_known
from autods.types import Fit, Knobs, Record, TierUse, Timing, Trial

RECORD = Record(
    id=1,
    trial=Trial(rung="zero2", knobs=Knobs(settings={"a.b": True, "c": 3, "d": 1.5, "e": "x"}), purpose="walk"),
    outcome=Fit(
        memory={"device": TierUse(peak_bytes=4)},
        samples_per_second=3,
        tokens_per_second=None,
        step_s=(1.0, 2.0),
        spread=0.1,
        losses=(1.0, math.inf),
        timing=Timing(wall_s=1.0),
    ),
    seconds=3.0,
)
ROW: dict[str, Any] = json.loads(json.dumps(asdict(RECORD)))
# Dotted key, its value → the message.
WRONG = {
    "text for a number": ("id", "4", "record.id is '4', not a whole number"),
    "true for a number": ("id", True, "record.id is True, not a whole number"),
    "a fraction for a whole number": ("trial.repeat", 1.0, "record.trial.repeat is 1.0, not a whole number"),
    "a number for a switch": ("trial.limited", 1, "record.trial.limited is 1, not true or false"),
    "a number for text": ("trial.rung", 3, "record.trial.rung is 3, not text"),
    "an unknown key": ("colour", "red", "record has the unknown key 'colour'; it has id, trial, outcome, seconds"),
    "an unknown word": ("trial.purpose", "no", "record.trial.purpose is 'no', not one of walk, shortfall"),
    "an unknown kind": ("outcome.kind", "no", "record.outcome.kind is 'no', not one of fit, out_of_memory, failed"),
    "an item of a list": ("outcome.step_s", [1.0, "2"], "record.outcome.step_s[1] is '2', not a number"),
    "text for a list": ("outcome.step_s", "12", "record.outcome.step_s is '12', not a list"),
    "an unknown key of a table": ("outcome.memory", {"gpu": {"peak_bytes": 1}}, "record.outcome.memory is 'gpu', not"),
    "a list for a table": ("trial.knobs", [1], r"record.trial.knobs is [1], not a table"),
    "a list for a scalar": ("trial.knobs.settings.z", [1], "settings.z is [1], not true or false or a whole number or"),
    "nothing for a table": ("outcome.timing", None, "record.outcome.timing is None, not a table"),
}


def test_what_was_written_is_read_again() -> None:
    assert read_as(Record, ROW) == RECORD


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_named_with_its_place(name: str) -> None:
    key, value, message = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        read_as(Record, merge(ROW, nest_key(key, value)), name="record")


def test_a_missing_key_is_named_with_its_place() -> None:
    trial = {key: value for key, value in ROW["trial"].items() if key != "knobs"}
    with pytest.raises(ValueError, match=r"^record\.trial lacks 'knobs'$"):
        read_as(Record, {**ROW, "trial": trial}, name="record")


def test_a_union_without_its_kind_is_refused() -> None:
    outcome = {key: value for key, value in ROW["outcome"].items() if key != "kind"}
    with pytest.raises(ValueError, match=r"outcome\.kind is None, not one of fit"):
        read_as(Record, {**ROW, "outcome": outcome})


def test_numbers_and_text_stay_as_they_were_written() -> None:
    read = read_as(Record, {**ROW, "seconds": 3, "trial": {**ROW["trial"], "rung": "\udcff"}})
    assert (repr(read.seconds), read.trial.rung) == ("3", "\udcff")  # a path of another encoding has such letters


def test_unknown_keys_are_skipped_where_that_is_asked_for() -> None:
    assert read_known(Record, {**ROW, "colour": "red"}) == RECORD
