from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from autods.forecast.simulator.shape_cache import Lessons


@dataclass
class Recipes:
    """Stands in for `recipes.Recipes`, which needs torch."""

    learned: bytes = b""
    heard: list[bytes] = field(default_factory=list)

    def told(self) -> bytes:
        learned, self.learned = self.learned, b""
        return learned

    def hear(self, told: bytes) -> None:
        self.heard.append(told)


@pytest.fixture
def recipes() -> Recipes:
    return Recipes()


@pytest.fixture
def lessons(recipes: Recipes) -> Iterator[Lessons]:
    made = Lessons(recipes)  # type: ignore[arg-type]
    yield made
    for value in vars(made).values():
        if isinstance(value, socket.socket):
            value.close()


def test_what_engines_learned_is_heard_in_order_however_long_it_is(recipes: Recipes, lessons: Lessons) -> None:
    for learned in (b"short", b"x" * 2**22):
        recipes.learned = learned
        lessons.tell()
    lessons.hear()
    assert recipes.heard == [b"short", b"x" * 2**22]


@pytest.mark.parametrize("recipes", [Recipes(learned=b"at start")])
def test_what_was_known_before_is_not_told(recipes: Recipes, lessons: Lessons) -> None:
    lessons.tell()
    lessons.hear()
    assert recipes.heard == []


def test_an_engine_does_not_wait_for_somebody_who_does_not_hear(recipes: Recipes, lessons: Lessons) -> None:
    for number in range(3000):
        recipes.learned = str(number).encode()
        lessons.tell()
    lessons.hear()
    assert recipes.heard[0] == b"0"
    assert len(recipes.heard) < 3000
