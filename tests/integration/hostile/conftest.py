"""How rows of hostile input are run: `meet` runs a case and checks its ending. The rows lie in the test modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autods.runner.runner import RayRunner
from tests.support.fits import ignore, question
from tests.support.hostile import (
    ACCEPTING,
    ON_MADE_UP_RANKS,
    Case,
    Ending,
    Lines,
    OtherUser,
    check,
    end_in_process,
    is_json,
    on_ranks,
    other_user,
    with_json,
)

Meet = Callable[[Case], Ending]


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """All selected lines of bash of this module, which begin to run now, some at a time."""
    lines = Lines(tmp_path_factory.mktemp("lines"))
    for item in request.session.items:
        call = getattr(item, "callspec", None)  # of a parametrized test
        case = call.params.get("case") if call and item.path == request.path else None
        if isinstance(case, Case) and case.way == "shell" and not item.get_closest_marker("skip"):
            lines.start(case)
    return lines


@pytest.fixture(scope="session")
def runner(ray: object, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRunner]:
    """One zygote for all modules. It cannot preload a workload, so that each rank imports its own."""
    with RayRunner(question("threaded.py", tmp_path_factory.mktemp("shared")), ignore) as runner:
        yield runner


@pytest.fixture
def meet(request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Meet:
    """Run a case and return its ending, or fail unless that is as it should be. Refusals are met with --json, too."""

    def meet(case: Case) -> Ending:
        if case.way == "shell":
            ending = request.getfixturevalue("lines").end(case)
            check(case, ending)
            return ending
        case.write_files(tmp_path)
        commands = {"here": ACCEPTING, "made up": ON_MADE_UP_RANKS}.get(case.way, {})
        if case.way == "ranks":
            commands = {"fit": on_ranks(request.getfixturevalue("runner"))}
        ending = end_in_process(case, tmp_path, capfd, **commands)
        check(case, ending)
        if case.way == "here" and case.exit_code in (2, 3) and not is_json(case.line):
            case = with_json(case)
            check(case, end_in_process(case, tmp_path, capfd, **commands))
        return ending

    return meet


@pytest.fixture(scope="session")
def other() -> Iterator[OtherUser]:
    """Another user of this machine."""
    with other_user() as user:
        yield user
