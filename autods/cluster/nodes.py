"""The nodes of a fit: chosen, held, and others in place of those that are lost."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import EnvironmentBroken
from ..events import Event, Note
from ..hardware import look
from ..settings import Settings
from ..trial.spec import RankJob
from .launch import Offer, launch
from .mustering import Mustered, muster
from .parts import parts_of, repeated, shared_folders
from .ray_session import is_connected, session
from .team import Report, Team


class Nodes:
    """A context manager: Ray, the actors and their zygotes live inside it. `run` answers one job.

    check: told what each zygote says when it has loaded everything; it raises where that is no use. within_s: others
    may hold what is needed for so long; None: for ever.
    """

    def __init__(
        self,
        settings: Settings,
        listen: Callable[[Event], None],
        *,
        environment: Mapping[str, str],
        check: Callable[[Report], None],
        within_s: float | None = None,
    ) -> None:
        self.settings, self.listen, self.environment, self.check = settings, listen, environment, check
        self.within_s = within_s
        self.built: set[str] = set()  # DeepSpeed's ops that all of them have loaded
        self.exits = contextlib.ExitStack()
        self.ray: Any = None
        self.mustered: Mustered | None = None

    def __enter__(self) -> Nodes:
        with contextlib.ExitStack() as stack:
            offered = self._offered(stack)
            self.ray = stack.enter_context(session(cpus=max(2, os.cpu_count() or 2), address=self.settings.address))
            stack.callback(self.dismiss)
            self._muster(offered)
            self.exits = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self.exits.close()

    @property
    def host_bytes(self) -> int | None:
        """Of the node of somebody's cluster that has the least; None for a Ray of our own."""
        return self.mustered.host_bytes if self.mustered is not None else None

    @property
    def hosts(self) -> frozenset[str]:
        """Addresses of their machines."""
        return frozenset(member.node.address for member in self.team.members)

    @property
    def host_free_bytes(self) -> int:
        """Of the node that had the least when they were chosen; on this machine now."""
        chosen = self.mustered.host_free_bytes if self.mustered is not None else None
        return look().host_free_bytes if chosen is None else chosen

    @property
    def team(self) -> Team:
        """The nodes, or others in place of those that were lost. Raises EnvironmentBroken where too few are left."""
        assert self.mustered is not None
        lost = self.mustered.team.lost
        if lost is not None and not self.mustered.team.is_headless():
            self.listen(
                Note(text=f"node {lost.node.address} was lost ({lost.lost}); the ranks are placed on what is left")
            )
            self.dismiss()
            self.built.clear()  # a node that is new may not have them
            self._muster()
        return self.mustered.team

    def run(
        self,
        job: RankJob,
        told: Callable[[str, int], None] = lambda phase, step: None,
        *,
        everywhere: bool = False,
    ) -> Sequence[Report]:
        """The report of each node that has a part in the job. told: see `Team.execute`.

        everywhere: every node does all of it by itself; else its ranks are cut along the nodes.
        """
        team, each = self.team, self.settings.ranks_per_node
        if team.is_headless():
            return [_headless(team)]
        if everywhere:
            parts = repeated(job, team.members)
        else:
            bound = team.bind() if job.world_size > each else {"bound": None}
            if "bound" not in bound:
                return [bound]
            parts = parts_of(job, team.members, each, bound["bound"])
        with shared_folders(parts):
            reports = team.execute(parts, told)
        if team.headless is not None:
            return [*reports, _headless(team)]
        if team.lost is not None and self.settings.address is None:
            raise EnvironmentBroken(f"the Ray actor of this node died: {team.lost.lost}")
        return reports

    def uncached(self, ops: Sequence[str]) -> bool:
        """Whether one of these DeepSpeed ops has to be built on any node."""
        actors = [member.actor for member in self.team.members] if ops else []
        return any(self.ray.get([actor.uncached.remote(list(ops)) for actor in actors]))

    def dismiss(self) -> None:
        """All ranks gone, then the zygotes, then the actors; Ray itself is the session's."""
        if self.mustered is not None:
            self.mustered.dismiss()

    def _muster(self, offered: str | None = None) -> None:
        """Nodes for the ranks, each with a zygote that has loaded everything."""
        self.mustered = muster(
            self.ray,
            self.settings,
            self.listen,
            environment=self.environment,
            offered=offered,
            within_s=self.within_s,
        )
        for ready in self.mustered.ready():
            self.check(ready)

    def _offered(self, stack: contextlib.ExitStack) -> str | None:
        """Have a zygote load while Ray starts, for the actor to take; its name.

        None where the actor starts it itself: it may be on another machine, or be the one that knows its cards.
        """
        settings = self.settings
        if settings.device != "cpu" or settings.address is not None or is_connected():
            return None
        log = str(settings.out / "logs" / "zygote.log")
        return stack.enter_context(
            Offer(*launch(settings.source, settings.device, os.getpid(), log, self.environment))
        ).name


def _headless(team: Team) -> Report:
    assert team.head is not None
    return {"headless": team.headless, "address": team.head.address}
