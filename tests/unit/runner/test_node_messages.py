"""The messages of zygotes and ranks survive their way as JSON."""

from __future__ import annotations

import pytest

from autods.diagnosis.evidence import HostUsage
from autods.runner.node_messages import (
    Heartbeat,
    LoadFailed,
    RankError,
    Ready,
    StoreBound,
    StoreFailed,
    ZygoteMessage,
    decode,
    encode,
)
from tests.support.ends import rank_exit, report_of

ERROR = {"types": ["ValueError"], "message": "no", "causes": [["KeyError", "'loss'"]], "hint": "give one"}


@pytest.mark.parametrize(
    "message",
    [
        Ready(pid=7, spawn_because="CUDA was initialised while importing"),
        LoadFailed(error=RankError(types=("ValueError",), message="no")),
        StoreBound(port=29500),
        StoreFailed(reason="10.0.0.1: Cannot assign requested address"),
        Heartbeat(phase="forward", step=3),
        report_of(
            rank_exit(0, result={"losses": [1.0]}),
            rank_exit(1, error=ERROR, exit_code=1),
            rank_exit(2, exit_code=-9, killed_by_us=True),
            rank_exit(3, lost="stuck", log_tail="its stack"),
            host=HostUsage(limit_bytes=2**30, least_free_bytes=2**20, peak_rss_bytes={"0": 7}),
            swap_bytes=12,
            notes=("a note",),
        ),
    ],
    ids=lambda message: message.kind,
)
def test_a_message_is_decoded_as_it_was_encoded(message: ZygoteMessage) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


@pytest.mark.parametrize("line", [b'{"kind": "other"}', b'{"kind": "ready"}', b"[]", b"{"])
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(line)


def test_times_are_shifted_to_the_drivers_clock_but_unknown_ones() -> None:
    report = report_of(rank_exit(0, result={}, at_s=3610.0), rank_exit(1, lost="stuck", at_s=0.0), gone_at_s=3612.0)
    shifted = report.on_driver_clock(3600.0)
    assert ([rank.at_s for rank in shifted.ranks], shifted.gone_at_s) == ([10.0, 0.0], 12.0)
