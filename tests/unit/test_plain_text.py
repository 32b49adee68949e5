"""Text of code that is not ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autods.plain_text import clean, read_text, read_traceback
from autods.rank.record import describe_error


class Raising(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Mute(Raising):
    def __repr__(self) -> str:
        raise SystemExit(3)


class Other(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class Text(str):
    def __getitem__(self, index: object) -> str:
        raise ValueError(index)


class Subclass(Exception):
    def __str__(self) -> str:
        return Text("text")


# An exception, and what is read of it.
READ: dict[str, tuple[BaseException, str]] = {
    "colours": (ValueError("\x1b[31mred\x1b[0m"), "red"),
    "a title for the terminal": (ValueError("\x1b]0;title\x07text"), "text"),
    "NUL": (ValueError("a\0b"), "a\\x00b"),
    "half a character": (ValueError("a\udc80b"), "a\\udc80b"),
    "another direction": (ValueError("a\u202eb\u2028c"), "a\\u202eb\\u2028c"),
    "a return to the line's begin": (ValueError("done\rerror"), "done\\rerror"),
    "lines": (ValueError("a\r\nb\n\tc"), "a\nb\n\tc"),
    "letters of all kinds": (ValueError("größer ≥ 你好 👍"), "größer ≥ 你好 👍"),
    "a __str__ that raises": (Raising(1), "Raising(1)"),
    "__str__ and __repr__ that raise": (Mute(), "(no text: its __str__ raises an exception)"),
    "a __str__ that returns a number": (Other(1), "Other(1)"),
    "a str that is none": (Subclass(1), "Subclass(1)"),
}


@pytest.mark.parametrize("name", READ)
def test_any_exception_is_read_as_printable_text(name: str) -> None:
    error, text = READ[name]
    assert read_text(error) == text
    described = describe_error(error, "/model.py")
    assert described.message == text
    described.traceback.encode()  # nothing in it that cannot be written
    assert type(error).__name__ in described.traceback


def test_a_long_message_leaves_room_for_the_traceback() -> None:
    def fail() -> None:
        raise ValueError("x" * 10_000_000)

    text = read_traceback(caught(fail))
    assert "in fail" in text
    assert len(text) < 10_000
    assert len(read_text(caught(fail))) < 10_000


def test_a_base_exception_has_a_type() -> None:
    assert describe_error(BaseException("x"), "/model.py").types == ("BaseException",)
    assert describe_error(KeyboardInterrupt(), "/model.py").types == ("KeyboardInterrupt",)


def test_causes_in_a_circle_are_read_once() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert describe_error(first, "/model.py").causes == (("ValueError", "second"), ("ValueError", "first"))


def test_a_class_with_an_odd_name_is_printable() -> None:
    error = type("\x1b[31mE\x07", (Exception,), {})("x")
    assert describe_error(error, "/model.py").types[0] == "E\\x07"


def test_clean_text_stays_as_it_is() -> None:
    assert clean("a\tb\nc") == "a\tb\nc"


def caught(fail: Callable[[], None]) -> BaseException:
    try:
        fail()
    except BaseException as error:
        return error
    raise AssertionError
