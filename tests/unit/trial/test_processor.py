from __future__ import annotations

from typing import Any

from autods.trial.processor import Processor, described

OF_TWO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: A Fast One @ 2.1 GHz
flags\t\t: fpu avx512f avx2

processor\t: 1
vendor_id\t: SomebodyElse
flags\t\t: fpu
"""


def test_vendor_brand_and_flags_are_those_of_the_first_processor() -> None:
    assert described(OF_TWO, "x86_64") == {
        "arch": "X86_64",
        "vendor_id_raw": "GenuineIntel",
        "brand_raw": "A Fast One @ 2.1 GHz",
        "flags": ["avx2", "avx512f", "fpu"],
    }


def test_nothing_is_said_of_another_architecture_or_of_an_unreadable_text() -> None:
    assert described(OF_TWO, "aarch64") == {}
    assert described("", "x86_64") == {}


def test_what_was_not_read_is_looked_up_once_when_it_is_asked_for() -> None:
    asked: list[int] = []

    def whole() -> dict[str, Any]:
        asked.append(1)
        return {"arch": "X86_64", "count": 2, "stepping": 1}

    processor = Processor({"arch": "X86_64"}, whole)
    assert processor["arch"] == "X86_64"
    assert asked == []
    assert (processor["count"], processor["stepping"]) == (2, 1)
    assert asked == [1]
