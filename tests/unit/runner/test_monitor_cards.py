from collections.abc import Callable

from autods.runner.monitor import CardWatch

GIB = 2**30


def readings(*held: tuple[int, ...] | None) -> Callable[[], tuple[int, ...] | None]:
    """One after the other, then the last for ever."""
    left = list(held)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


def waits() -> tuple[list[float], Callable[[float], None]]:
    seen: list[float] = []
    return seen, seen.append


def test_a_card_that_comes_back_at_once_costs_no_wait() -> None:
    seen, wait = waits()
    assert CardWatch.begin("cuda", 1, readings((3 * GIB,), (3 * GIB + 2**20,))).said(wait) == []
    assert not seen


def test_the_driver_is_given_a_moment_to_free_what_a_dead_process_held() -> None:
    seen, wait = waits()
    watch = CardWatch.begin("cuda", 2, readings((0, 0), (GIB, 0), (GIB, 0), (0, 0)))
    assert watch.said(wait) == []
    assert len(seen) == 2


def test_a_card_that_does_not_come_back_is_said_with_how_much() -> None:
    seen, wait = waits()
    (said,) = CardWatch.begin("cuda", 2, readings((0, 0), (0, 5 * GIB))).said(wait)
    assert said.startswith("card 1 did not come back after this trial: 5.0 GiB more than before are held")
    assert 2.5 < sum(seen) < 3.5


def test_cards_that_no_rank_uses_are_not_looked_at() -> None:
    assert CardWatch.begin("cuda", 1, readings((0, 0), (0, 5 * GIB))).said(lambda seconds: None) == []


def test_where_nvml_does_not_tell_nothing_is_said() -> None:
    assert CardWatch.begin("cuda", 1, readings(None)).said(lambda seconds: None) == []
    assert CardWatch.begin("cuda", 1, readings((0,), None)).said(lambda seconds: None) == []


def test_cpu_ranks_have_no_card() -> None:
    def never() -> tuple[int, ...]:
        raise AssertionError("asked")

    assert CardWatch.begin("cpu", 2, never).said() == []
