from __future__ import annotations

from dataclasses import dataclass, field

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


def test_what_engines_learned_is_heard_in_order_however_long_it_is() -> None:
    recipes = Recipes()
    lessons = Lessons(recipes)  # type: ignore[arg-type]
    for learned in (b"short", b"x" * 2**22):
        recipes.learned = learned
        lessons.tell()
    lessons.hear()
    assert recipes.heard == [b"short", b"x" * 2**22]


def test_what_was_known_before_is_not_told() -> None:
    recipes = Recipes(learned=b"at start")
    lessons = Lessons(recipes)  # type: ignore[arg-type]
    lessons.tell()
    lessons.hear()
    assert recipes.heard == []


def test_an_engine_does_not_wait_for_somebody_who_does_not_hear() -> None:
    recipes = Recipes()
    lessons = Lessons(recipes)  # type: ignore[arg-type]
    for number in range(3000):
        recipes.learned = str(number).encode()
        lessons.tell()
    lessons.hear()
    assert recipes.heard[0] == b"0"
    assert len(recipes.heard) < 3000
