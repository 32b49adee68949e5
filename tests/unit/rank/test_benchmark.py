"""What a machine cannot do is left out of its measurement, and is no speed."""

from __future__ import annotations

import pytest

from autods.rank.benchmark import move_file


def test_a_file_that_async_io_could_not_move_is_no_speed() -> None:
    calls: list[tuple[object, str, int]] = []

    def answer(number: int) -> int:
        def call(buffer: object, path: str, offset: int) -> int:
            calls.append((buffer, path, offset))
            return number

        move_file(call, "bytes", "/nvme/benchmark")
        return len(calls)

    assert answer(1) == 1
    with pytest.raises(OSError, match="cannot open /nvme/benchmark for direct I/O"):
        answer(-1)
    assert calls[1] == ("bytes", "/nvme/benchmark", 0)
