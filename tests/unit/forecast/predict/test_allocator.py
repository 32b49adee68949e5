"""The model of torch's CUDA caching allocator: numbers derived by hand from its rules, and properties of any trace."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from autods.forecast.predict.allocator import ExpandableHeap, Heap
from autods.forecast.predict.replay import Begun, RanOut, find_least_limit, repeat_last_step, replay
from autods.forecast.values import ForecastPhase, Trace

KIB, MIB = 2**10, 2**20
HEAPS = [Heap, ExpandableHeap]


def trace(*events: int, marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "init"),)) -> Trace:
    return Trace(events=events, marks=marks)


def free(block: int) -> int:
    return -block - 1


def test_a_byte_takes_512_of_a_segment_of_2_mib() -> None:
    replayed = replay(trace(1))
    assert (replayed.peak_allocated_bytes, replayed.peak_reserved_bytes) == (512, 2 * MIB)


def test_an_empty_tensor_takes_nothing_and_can_be_freed() -> None:
    replayed = replay(trace(0, free(0), 512))
    assert (replayed.peak_allocated_bytes, replayed.peak_reserved_bytes) == (512, 2 * MIB)


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (MIB, 2 * MIB),  # the largest small request
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # a segment of its own, rounded up to 2 MiB
        (10 * MIB + 1, 12 * MIB),
        (1001 * MIB, 1002 * MIB),
    ],
)
def test_a_segment_is_2_mib_20_mib_or_the_request_rounded_up(asked: int, reserved: int) -> None:
    assert replay(trace(asked)).peak_reserved_bytes == reserved


@pytest.mark.parametrize("expandable", [False, True])
def test_a_stream_never_gets_a_block_of_another(expandable: bool) -> None:
    events = (20 * MIB, free(0), 20 * MIB)
    same = replay(Trace(events=events, marks=((0, "init"),), streams=(1, 1)), expandable=expandable)
    other = replay(Trace(events=events, marks=((0, "init"),), streams=(0, 1)), expandable=expandable)
    assert (same.peak_reserved_bytes, other.peak_reserved_bytes) == (20 * MIB, 40 * MIB)
    assert other.peak_allocated_bytes == 20 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_a_block_that_another_stream_uses_comes_back_late(expandable: bool) -> None:
    events = (20 * MIB, free(0), 20 * MIB, free(1), 20 * MIB)
    held = Trace(events=events, marks=((0, "init"),), streams=(0, 0, 0), held={0: 4})
    assert replay(replace(held, held={}), expandable=expandable).peak_reserved_bytes == 20 * MIB
    late = replay(held, expandable=expandable)
    assert late.peak_reserved_bytes == 40 * MIB
    assert late.peak_allocated_bytes == 20 * MIB


@pytest.mark.parametrize("expandable", [False, True])
def test_at_the_limit_torch_waits_for_the_other_stream(expandable: bool) -> None:
    events = (20 * MIB, free(0), 20 * MIB)
    held = Trace(events=events, marks=((0, "init"),), streams=(0, 0), held={0: 3})
    limited = replay(held, expandable=expandable, limit_bytes=20 * MIB)
    assert (limited.ran_out, limited.retries, limited.peak_reserved_bytes) == (None, 1, 20 * MIB)


def test_emptying_the_cache_gives_back_blocks_that_are_held() -> None:
    events = (20 * MIB, free(0), 20 * MIB)
    held = Trace(events=events, marks=((0, "init"),), streams=(0, 0), held={0: 3}, emptied=(2,))
    assert replay(held).peak_reserved_bytes == 20 * MIB


def test_small_requests_share_a_segment_until_it_is_full() -> None:
    assert replay(trace(*[512 * KIB] * 4)).peak_reserved_bytes == 2 * MIB
    assert replay(trace(*[512 * KIB] * 5)).peak_reserved_bytes == 4 * MIB


def test_requests_below_10_mib_share_a_segment_of_20_mib() -> None:
    # 6 + 6 + 6 leave 2 MiB, which a fourth request of 2 MiB still takes.
    assert replay(trace(*[6 * MIB] * 3, 2 * MIB)).peak_reserved_bytes == 20 * MIB
    assert replay(trace(*[6 * MIB] * 4)).peak_reserved_bytes == 40 * MIB


def test_a_freed_block_is_given_out_again() -> None:
    assert replay(trace(100 * MIB, free(0), 100 * MIB)).peak_reserved_bytes == 100 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    # 32 MiB goes into the free 40, not the free 60; so the last request finds its 60.
    events = (60 * MIB, 40 * MIB, free(0), free(1), 32 * MIB, 60 * MIB)
    assert replay(trace(*events)).peak_reserved_bytes == 100 * MIB


def test_a_large_block_is_not_split_for_a_mebibyte() -> None:
    # 99 of 100 MiB: the last MiB goes with it. 98.5 of 100: 1.5 MiB are split off.
    assert replay(trace(100 * MIB, free(0), 99 * MIB)).peak_allocated_bytes == 100 * MIB
    split = replay(trace(100 * MIB, free(0), 98 * MIB + MIB // 2, 3 * MIB // 2))
    assert (split.peak_allocated_bytes, split.peak_reserved_bytes) == (100 * MIB, 100 * MIB)


def test_freed_neighbours_become_one_block_again() -> None:
    # 100 MiB cut into four; the middle ones are freed first, then the outer ones: whole again.
    cut = (100 * MIB, free(0), *[25 * MIB] * 4)
    assert replay(trace(*cut, free(2), free(3), 50 * MIB)).peak_reserved_bytes == 100 * MIB
    assert replay(trace(*cut, free(2), free(3), free(1), free(4), 100 * MIB)).peak_reserved_bytes == 100 * MIB


def test_blocks_that_are_not_neighbours_do_not_merge() -> None:
    events = (100 * MIB, free(0), *[25 * MIB] * 4, free(1), free(3), 50 * MIB)
    assert replay(trace(*events)).peak_reserved_bytes == 150 * MIB


def test_blocks_of_two_segments_never_merge() -> None:
    assert replay(trace(20 * MIB, 20 * MIB, free(0), free(1), 40 * MIB)).peak_reserved_bytes == 80 * MIB


def test_expandable_segments_avoid_what_fixed_ones_lose() -> None:
    # Growing by 2 MiB each time, freeing the one before: a new segment each time, or the last two side by side.
    events: list[int] = []
    for number in range(10):
        events.append((100 + 2 * number) * MIB)
        if number:
            events.append(free(number - 1))
    fixed, grown = replay(trace(*events)), replay(trace(*events), expandable=True)
    assert fixed.peak_allocated_bytes == grown.peak_allocated_bytes == (116 + 118) * MIB
    assert fixed.peak_reserved_bytes > 1.5 * grown.peak_reserved_bytes


def test_expandable_segments_map_pages_of_2_and_20_mib() -> None:
    assert replay(trace(1), expandable=True).peak_reserved_bytes == 2 * MIB
    assert replay(trace(21 * MIB), expandable=True).peak_reserved_bytes == 40 * MIB
    # What the first request left of its last page serves the second.
    assert replay(trace(21 * MIB, 19 * MIB), expandable=True).peak_reserved_bytes == 40 * MIB
    assert replay(trace(21 * MIB, 20 * MIB), expandable=True).peak_reserved_bytes == 60 * MIB


def test_an_expandable_block_grows_at_its_end() -> None:
    # 30 MiB freed at the end of the range, then 50: 40 mapped + 20 more, not 40 + 60.
    assert replay(trace(30 * MIB, free(0), 50 * MIB), expandable=True).peak_reserved_bytes == 60 * MIB


def test_at_the_limit_cached_segments_are_given_back() -> None:
    replayed = replay(trace(60 * MIB, free(0), 80 * MIB), limit_bytes=100 * MIB)
    assert (replayed.retries, replayed.ran_out, replayed.peak_reserved_bytes) == (1, None, 80 * MIB)


def test_a_segment_in_which_something_lies_cannot_be_given_back() -> None:
    # 60 MiB of which 30 are used keep 60 reserved: 80 more do not fit into 100.
    events = (60 * MIB, free(0), 30 * MIB, 30 * MIB, free(2), 80 * MIB)
    replayed = replay(trace(*events, marks=((0, "init"), (5, "backward"))), limit_bytes=100 * MIB)
    assert replayed.ran_out is not None
    assert replayed.ran_out == RanOut(phase="backward", wanted_bytes=80 * MIB)
    assert (replayed.peak_reserved_bytes, replayed.allocated_by_phase["backward"]) == (60 * MIB, 30 * MIB)


def test_expandable_pages_around_a_used_block_can_be_given_back() -> None:
    # The same: of 60 MiB the last page (40 to 60) is empty, so 40 stay reserved and 60 more fit, but not 80.
    events = (60 * MIB, free(0), 30 * MIB, 30 * MIB, free(2))
    # The free 10 MiB behind the used 30 count: 70 MiB reach from there, with 60 newly mapped.
    assert replay(trace(*events, 70 * MIB), expandable=True, limit_bytes=120 * MIB).ran_out is None
    assert replay(trace(*events, 90 * MIB), expandable=True, limit_bytes=100 * MIB).ran_out is not None


def test_a_phase_that_comes_again_keeps_its_highest_peak() -> None:
    marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "init"), (1, "forward"), (3, "step"), (3, "forward"))
    events = (20 * MIB, 100 * MIB, free(1), 40 * MIB)
    assert replay(trace(*events, marks=marks)).allocated_by_phase == {
        "init": 20 * MIB,
        "forward": 120 * MIB,
        "step": 20 * MIB,
    }


def test_an_emptied_cache_gives_back_whole_segments() -> None:
    events = (60 * MIB, 40 * MIB, free(0), 80 * MIB)
    kept = replay(Trace(events=events, marks=((0, "init"),)))
    emptied = replay(Trace(events=events, marks=((0, "init"),), emptied=(3,)))
    assert (kept.peak_reserved_bytes, emptied.peak_reserved_bytes) == (180 * MIB, 120 * MIB)


def test_only_retries_after_the_first_step_are_late() -> None:
    one = (60 * MIB, free(0), 80 * MIB, free(1))
    marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "forward"), (4, "step"), (4, "forward"), (8, "step"))
    again = (*one, 60 * MIB, free(2), 80 * MIB, free(3))
    settled = replay(trace(*again, marks=marks), limit_bytes=100 * MIB)
    assert (settled.retries, settled.late_retries, settled.runs_well) == (1, 0, True)
    thrashing = (*one, 60 * MIB, 30 * MIB, free(2), free(3), 90 * MIB, free(4))
    tried = replay(trace(*thrashing, marks=(*marks[:3], (9, "step"))), limit_bytes=110 * MIB)
    assert tried.late_retries > 0


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_least_limit_runs_well(seed: int, expandable: bool) -> None:
    made = trace(*made_up(seed))
    roomy = replay(made, expandable=expandable)
    least, _ = find_least_limit(made, roomy, expandable=expandable)
    assert roomy.peak_allocated_bytes <= least
    assert replay(made, expandable=expandable, limit_bytes=least).runs_well


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_bound_leaves_the_least_limit_on_its_side(seed: int, expandable: bool) -> None:
    made = trace(*made_up(seed))
    roomy = replay(made, expandable=expandable)
    least, _ = find_least_limit(made, roomy, expandable=expandable)
    for bound in range(roomy.peak_allocated_bytes * 9 // 10, roomy.peak_reserved_bytes * 11 // 10, 7 * MIB):
        rough, _ = find_least_limit(made, roomy, expandable=expandable, bound_bytes=bound)
        assert (rough > bound) == (least > bound)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_replay_is_the_same_down_to_what_it_was_granted(seed: int, expandable: bool) -> None:
    made = trace(*made_up(seed))
    roomy = replay(made, expandable=expandable)
    tight = replay(
        made, expandable=expandable, limit_bytes=(roomy.peak_allocated_bytes + roomy.peak_reserved_bytes) // 2
    )
    for known in (roomy, tight):
        assert replay(made, expandable=expandable, limit_bytes=known.same_from_bytes) == known
    below = replay(made, expandable=expandable, limit_bytes=roomy.same_from_bytes - 512)
    assert below.retries == roomy.retries + 1 or below.ran_out is not None


def test_a_limit_leaves_room_for_the_segment_torch_asks_for() -> None:
    # 18 of the first 40 MiB are left, so 20 more are mapped for the second request; torch asks for 30 first.
    made = trace(22 * MIB, 30 * MIB)
    roomy = replay(made, expandable=True)
    assert not replay(made, expandable=True, limit_bytes=roomy.peak_reserved_bytes).runs_well
    least, best = find_least_limit(made, roomy, expandable=True)
    assert roomy.peak_reserved_bytes == 60 * MIB < least
    assert best.runs_well


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_repeated_step_runs_well_at_the_least_limit(seed: int, expandable: bool) -> None:
    init, step = made_up(seed, 200), made_up(seed + 100, 400)
    left = set(range(sum(event >= 0 for event in step))) - {~event for event in step if event < 0}
    step += [free(block) for block in left]
    events = list(init)
    marks: list[tuple[int, ForecastPhase]] = [(0, "init")]
    for _ in range(2):
        older = sum(event >= 0 for event in events)
        marks.append((len(events), "forward"))
        events += [event if event >= 0 else event - older for event in step]
        marks.append((len(events), "step"))
    made = Trace(events=events, marks=tuple(marks))
    least, _ = find_least_limit(made, replay(made, expandable=expandable), expandable=expandable)
    assert replay(repeat_last_step(made), expandable=expandable, limit_bytes=least).runs_well


def made_up(seed: int, length: int = 3000) -> list[int]:
    """Allocations and frees as training makes them: many small, some large, sizes that come again."""
    chance = random.Random(seed)
    sizes = [int(2 ** chance.uniform(0, 27)) for _ in range(20)]
    events: list[int] = []
    live: list[int] = []
    count = 0
    while len(events) < length:
        if live and chance.random() < 0.48:
            events.append(free(live.pop(chance.randrange(len(live)))))
        else:
            events.append(chance.choice(sizes) if chance.random() < 0.7 else int(2 ** chance.uniform(0, 26)))
            live.append(count)
            count += 1
    return events


def live_after(events: Sequence[int]) -> Iterator[int]:
    """Bytes asked for and not yet freed, after each event."""
    asked: list[int] = []
    now = 0
    for event in events:
        if event >= 0:
            asked.append(event)
            now += event
        else:
            now -= asked[-event - 1]
        yield now


@pytest.mark.parametrize("kind", HEAPS)
@pytest.mark.parametrize("seed", range(8))
def test_reserved_is_at_least_allocated_is_at_least_live(seed: int, kind: type[Heap]) -> None:
    events = made_up(seed)
    heap = kind()
    for event, live in zip(events, live_after(events), strict=True):
        assert heap.run((event,)) is None
        assert heap.reserved >= heap.allocated >= live / 512


@pytest.mark.parametrize("limit", [None, 1500 * MIB])
@pytest.mark.parametrize("kind", HEAPS)
@pytest.mark.parametrize("seed", range(8))
def test_live_blocks_never_overlap_and_lie_in_reserved_memory(seed: int, kind: type[Heap], limit: int | None) -> None:
    events = made_up(seed)
    heap = kind(limit_bytes=limit)
    live: set[int] = set()
    for number, event in enumerate(events):
        if heap.run((event,)) is not None:
            break
        live.symmetric_difference_update({-event - 1} if event < 0 else {len(heap.sizes) - 1})
        if number % 50 == 0:
            used = sorted((heap.addresses[block], heap.sizes[block]) for block in live if heap.sizes[block])
            free_blocks = sorted(heap.starts.items())
            holes = sorted(heap.holes.items()) if isinstance(heap, ExpandableHeap) else []
            ranges = sorted([*used, *free_blocks, *holes])
            assert all(start + size <= later for (start, size), (later, _) in pairwise(ranges))
            # Used and free together are exactly what is reserved.
            assert sum(size for _, size in used) == heap.allocated
            assert heap.allocated + sum(heap.starts.values()) == heap.reserved
            assert sorted(heap.starts.items()) == sorted(
                (block & (2**40 - 1), block >> 40) for pool in heap.pools for block in pool
            )


@pytest.mark.parametrize("kind", HEAPS)
@pytest.mark.parametrize("seed", range(4))
def test_after_everything_is_freed_all_can_be_given_back(seed: int, kind: type[Heap]) -> None:
    events = made_up(seed)
    freed = {-event - 1 for event in events if event < 0}
    count = sum(event >= 0 for event in events)
    heap = kind()
    heap.run([*events, *(free(block) for block in range(count) if block not in freed)])
    assert heap.allocated == 0
    heap.release_all()
    assert heap.reserved == 0


@pytest.mark.parametrize("seed", range(4))
def test_replaying_in_phases_changes_nothing(seed: int) -> None:
    events = made_up(seed)
    whole = replay(trace(*events))
    cut = replay(trace(*events, marks=((0, "init"), (700, "forward"), (1500, "backward"), (2900, "step"))))
    assert whole.peak_reserved_bytes == cut.peak_reserved_bytes
    assert whole.peak_allocated_bytes == cut.peak_allocated_bytes


STEPS: tuple[tuple[int, ForecastPhase], ...] = (
    (0, "init"), (500, "forward"), (900, "backward"), (1300, "step"),
    (1500, "forward"), (1900, "backward"), (2300, "step"),
)  # fmt: skip


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_replay_that_starts_at_a_phase_ends_as_a_whole_one(seed: int, expandable: bool) -> None:
    events = made_up(seed)
    made = replace(trace(*events, marks=STEPS), emptied=(1300,), streams=[block % 3 for block in range(len(events))])
    begun: list[Begun] = []
    roomy = replay(made, expandable=expandable, keep=begun)
    assert len(begun) == len(STEPS)
    assert roomy == replay(made, expandable=expandable)
    for share in (0.1, 0.4, 0.6, 0.8, 0.9, 0.97, 1.0):
        limit = int(share * roomy.peak_reserved_bytes)
        for well in (False, True):
            whole = replay(made, expandable=expandable, limit_bytes=limit, only_if_well=well)
            assert whole == replay(made, expandable=expandable, limit_bytes=limit, only_if_well=well, begun=begun)
    assert find_least_limit(made, roomy, expandable=expandable, begun=begun) == find_least_limit(
        made, roomy, expandable=expandable
    )


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_limit_at_the_peak_needs_no_retry(seed: int, expandable: bool) -> None:
    events = made_up(seed)
    free_of_limits = replay(trace(*events), expandable=expandable)
    # An expandable segment asks for a page more than it maps when the limit is checked.
    room = 128 * MIB if expandable else 0
    limited = replay(trace(*events), expandable=expandable, limit_bytes=free_of_limits.peak_reserved_bytes + room)
    assert (limited.retries, limited.ran_out) == (0, None)


class Plain:
    """The same rules written down a second time, slowly: segments as lists of [address, size, used]."""

    def __init__(self) -> None:
        self.segments: dict[bool, list[list[list[int]]]] = {True: [], False: []}
        self.where: list[tuple[bool, int] | None] = []
        self.top = 0

    def allocate(self, asked: int) -> None:
        if asked == 0:
            self.where.append(None)
            return
        size = -(-asked // 512) * 512
        small = size <= MIB
        fitting = [
            (block[1], block[0], number, place)
            for number, segment in enumerate(self.segments[small])
            for place, block in enumerate(segment)
            if not block[2] and block[1] >= size
        ]
        if not fitting:
            length = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments[small].append([[self.top, length, 0]])
            self.top += length
            fitting = [(length, self.top - length, len(self.segments[small]) - 1, 0)]
        _, address, number, place = min(fitting)
        segment = self.segments[small][number]
        rest = segment[place][1] - size
        if rest >= 512 if small else rest > MIB:
            segment[place : place + 1] = [[address, size, 1], [address + size, rest, 0]]
        else:
            segment[place][2] = 1
        self.where.append((small, address))

    def free(self, number: int) -> None:
        if (found := self.where[number]) is None:
            return
        small, address = found
        segment = next(s for s in self.segments[small] if any(block[0] == address for block in s))
        place = next(place for place, block in enumerate(segment) if block[0] == address)
        segment[place][2] = 0
        for left in (place, place - 1):
            if 0 <= left < len(segment) - 1 and not segment[left][2] and not segment[left + 1][2]:
                segment[left][1] += segment.pop(left + 1)[1]

    def reserved(self) -> int:
        return sum(block[1] for pool in self.segments.values() for segment in pool for block in segment)

    def allocated(self) -> int:
        return sum(block[1] for pool in self.segments.values() for segment in pool for block in segment if block[2])


@pytest.mark.parametrize("seed", range(6))
def test_the_fast_model_agrees_with_the_rules_written_plainly(seed: int) -> None:
    events = made_up(seed, length=1500)
    heap, plain = Heap(), Plain()
    for number, event in enumerate(events):
        heap.run((event,))
        plain.allocate(event) if event >= 0 else plain.free(-event - 1)
        if number % 10 == 0:
            assert (heap.allocated * 512, heap.reserved * 512) == (plain.allocated(), plain.reserved())


TWO_STEPS: tuple[tuple[int, ForecastPhase], ...] = (
    (0, "init"),
    (1, "forward"),
    (2, "step"),
    (2, "forward"),
    (4, "step"),
)


def test_a_repeated_step_frees_what_the_last_one_left() -> None:
    # The gradient of the first step is freed in the second, which leaves its own.
    repeated = repeat_last_step(trace(4 * MIB, 2 * MIB, free(1), 2 * MIB, marks=TWO_STEPS))
    assert list(repeated.events) == [4 * MIB, 2 * MIB, free(1), 2 * MIB, free(2), 2 * MIB]
    assert repeated.marks == (*TWO_STEPS, (4, "forward"), (6, "step"))


@pytest.mark.parametrize("events", [(4 * MIB, 2 * MIB, 2 * MIB, 2 * MIB), (4 * MIB, 2 * MIB, free(0), 2 * MIB)])
def test_a_step_that_leaves_more_or_less_is_not_repeated(events: tuple[int, ...]) -> None:
    growing = trace(*events, marks=TWO_STEPS)
    assert repeat_last_step(growing) is growing


@pytest.mark.parametrize(("expandable", "returned"), [(False, 1), (True, 2)])  # a segment, or two pages
def test_late_blocks_of_a_repeated_step_come_back_late_too(expandable: bool, returned: int) -> None:
    step = (40 * MIB, 40 * MIB)
    events = (step[0], free(0), step[1], free(1), step[0], free(2), step[1], free(3))
    marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "forward"), (4, "step"), (4, "forward"), (8, "step"))
    made = Trace(events=events, marks=marks, streams=(0,) * 4, held={0: 4, 2: 8})
    repeated = repeat_last_step(made)
    assert repeated.held == {0: 4, 2: 8, 4: 12}
    limited = replay(repeated, expandable=expandable, limit_bytes=40 * MIB)
    assert (limited.runs_full, limited.late_retries, limited.late_returned) == (True, 1, returned)
    assert replay(repeated, expandable=expandable, limit_bytes=80 * MIB).runs_well


def test_what_only_the_second_step_gives_back_is_not_needed() -> None:
    # The first step leaves a segment that the second gives back for its larger block, and every later one finds it.
    events = (30 * MIB, free(0), 40 * MIB, free(1))
    marks: tuple[tuple[int, ForecastPhase], ...] = ((0, "forward"), (2, "step"), (2, "forward"), (4, "step"))
    made = trace(*events, marks=marks)
    assert replay(made, limit_bytes=45 * MIB).late_retries == 1
    least, best = find_least_limit(made, replay(made))
    assert least < 45 * MIB
    assert best.runs_well
