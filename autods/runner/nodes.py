"""The nodes of a fit: chosen, held, and replaced when lost."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import EnvironmentBroken
from ..events import Event, Note
from ..requests import Settings
from ..system import processes
from ..system.host import read_hardware
from ..trial.job import RankJob
from ..units import format_bytes
from .agent import Node, digest_of
from .placement import Need, Places, RayPlaces, Spot, reserve
from .ray_connect import said_by, session
from .worker_group import Member, Report, Team, own_place, parts_of, repeated, shared_folders

_STOPS_S = 10.0  # a node has waited for all that it ends in a third of that
_SOFTWARE = ("python", "torch", "deepspeed", "transformers")  # ranks of one job must have the same


@dataclass(slots=True)
class Mustered:
    """The team of a fit and its reservation. seen: what each node of somebody's cluster is, see `Node.seen`."""

    team: Team
    seen: Sequence[Mapping[str, Any]]
    places: Places
    group: Any
    ready_references: Sequence[Any] = field(default=())

    @property
    def host_bytes(self) -> int | None:
        """Of the node that has the least; None where none was asked."""
        return self._least("host_bytes")

    @property
    def host_free_bytes(self) -> int | None:
        """When it was chosen, of the node that had the least; None where none was asked."""
        return self._least("host_free_bytes")

    def _least(self, name: str) -> int | None:
        return min((int(one["hardware"][name]) for one in self.seen), default=None)

    def ready(self) -> list[dict[str, Any]]:
        """What each zygote said when it had loaded everything. Raises EnvironmentBroken when an actor died."""
        ray = self.team.ray
        try:
            return [dict(said) for said in ray.get(list(self.ready_references))]
        except ray.exceptions.RayActorError as error:
            raise EnvironmentBroken(f"a Ray actor died while it loaded: {said_by(error)}") from None

    def dismiss(self) -> None:
        """All ranks gone, then the zygotes, then the actors, and the reservation given back."""
        ray, actors = self.team.ray, [member.actor for member in self.team.members if member.lost is None]
        for asked, within_s in (("abort", 1), ("stop", _STOPS_S)):
            with contextlib.suppress(
                Exception
            ):  # Ray may already be going down; one that is late is stopped all the same
                ray.get([getattr(actor, asked).remote() for actor in actors], timeout=within_s)
        try:
            self.team.check_head()
        except EnvironmentBroken:
            return  # nobody is there to take back what was given
        for member in self.team.members:
            with contextlib.suppress(Exception):
                ray.kill(member.actor)
        with contextlib.suppress(Exception):
            self.places.free(self.group)


def need_of(settings: Settings) -> Need:
    """What the ranks of a node need.

    On a cluster that others use too, CPU ranks need a processor each; a Ray of our own is nobody else's.
    """
    ranks = settings.ranks_per_node
    shared = settings.address is not None
    cpus = ranks if shared and settings.device == "cpu" else 1
    return Need(nodes=settings.nodes, cpus=cpus, gpus=ranks if settings.device == "cuda" else 0)


def muster(
    ray: Any,
    settings: Settings,
    listen: Callable[[Event], None],
    *,
    environment: Mapping[str, str],
    places: Places | None = None,
    within_s: float | None = None,
) -> Mustered:
    """Nodes reserved, an actor on each, their zygotes loading: wait with `Mustered.ready`.

    Raises EnvironmentBroken when the cluster can never hold the ranks, or its nodes do not go together, NoRoom when it
    does not hold them `within_s`.
    """
    places = places or RayPlaces(ray)
    here = ray.get_runtime_context().get_node_id()
    need = need_of(settings)
    group, spots = reserve(places, need, say=lambda text: listen(Note(text=text)), first=here, within_s=within_s)
    members: list[Member] = []
    head = ray.get_runtime_context().gcs_address if settings.address is not None else None
    mustered = Mustered(team=Team(ray, members, head=head), seen=(), places=places, group=group)
    try:
        for number, spot in enumerate(spots):
            actor = _actor(ray, need, group, spot, settings, number, environment)
            members.append(Member(spot.node, actor))
        if settings.address is not None:
            mustered.seen = ray.get([member.actor.seen.remote() for member in members])
            check_alike(mustered.seen, spots)
            for said in differences(mustered.seen, spots):
                listen(Note(text=said))
            _check_shared(ray, members, settings)
            listen(Note(text=_where(spots, settings)))
        if len(members) > 1:
            mustered.team.set_clocks()
        mustered.ready_references = [member.actor.start.remote() for member in members]
    except ray.exceptions.RayActorError as error:
        mustered.dismiss()
        raise EnvironmentBroken(f"a node of the Ray cluster cannot be used: {said_by(error)}") from None
    except BaseException:
        mustered.dismiss()
        raise
    return mustered


def _actor(
    ray: Any,
    need: Need,
    group: Any,
    spot: Spot,
    settings: Settings,
    number: int,
    environment: Mapping[str, str],
) -> Any:
    """The node's actor, in its bundle."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    log = f"{own_place(str(settings.out / 'logs' / 'zygote'), number)}.log"
    # Three threads: `progress` and `abort` must get through while `run` waits for the ranks.
    options = {
        "num_cpus": need.cpus,
        "num_gpus": need.gpus,
        "max_concurrency": 3,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=spot.bundle
        ),
    }
    driver = {"pid": os.getpid(), "machine": processes.machine_id()}
    return ray.remote(**options)(Node).remote(asdict(settings.source), settings.device, driver, log, dict(environment))


def _check_shared(ray: Any, members: Sequence[Member], settings: Settings) -> None:
    """The workload, the results and what is swapped are at the same place on every node.

    Raises EnvironmentBroken with the first that is not.
    """
    logs = settings.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    mark = logs / f".shared-{secrets.token_hex(4)}"  # more than one may look at a time
    mark.write_text(secrets.token_hex(16))
    files = {path: digest for path in (str(mark), settings.source.path) if (digest := digest_of(path)) is not None}
    folders = [str(path) for path in (settings.out, settings.source.folder, settings.nvme_path) if path is not None]
    try:
        said = ray.get([member.actor.unseen.remote(files, folders) for member in members])
    finally:
        mark.unlink(missing_ok=True)
    for member, unseen in zip(members, said, strict=True):
        if not unseen:
            continue
        path = unseen[0] if unseen[0] != str(mark) else str(settings.out)
        if settings.nvme_path is not None and path == str(settings.nvme_path):
            raise EnvironmentBroken(f"{member.node.address} has no folder {path} that can be written\n  make it there")
        raise EnvironmentBroken(
            f"{member.node.address} does not see {path} as this machine does\n"
            "  the workload and --out have to lie in a folder that all nodes share, at the same place"
        )


def _where(spots: Sequence[Spot], settings: Settings) -> str:
    ranks = f"{settings.ranks_per_node} ranks on each of {', '.join(spot.node.address for spot in spots)}"
    return f"{ranks}; workload and results are in folders that they share, the package came through Ray's runtime_env"


def check_alike(seen: Iterable[Mapping[str, Any]], spots: Sequence[Spot]) -> None:
    """Ranks of one job speak one language. Raises EnvironmentBroken with the first difference."""
    known: dict[str, tuple[str, str]] = {}
    for one, spot in zip(seen, spots, strict=True):
        for name in _SOFTWARE:
            version = one["versions"][name]
            first, address = known.setdefault(name, (version, spot.node.address))
            if version != first:
                raise EnvironmentBroken(
                    f"the nodes differ in software: {name} {first} on {address}, {version} on {spot.node.address}\n"
                    f"  install the same on all: pip install {name}=={first}"
                )


def differences(seen: Sequence[Mapping[str, Any]], spots: Sequence[Spot]) -> list[str]:
    """What a person should know of cards that are not alike: the slowest and the smallest decide."""
    cards: dict[tuple[str, int], list[str]] = {}
    for one, spot in zip(seen, spots, strict=True):
        for card in one["hardware"]["cards"]:
            cards.setdefault((card["name"], card["total_bytes"]), []).append(spot.node.address)
    if len(cards) < 2:
        return []
    said = "; ".join(
        f"{len(where)} × {name} with {format_bytes(size)} on {', '.join(dict.fromkeys(where))}"
        for (name, size), where in cards.items()
    )
    return [f"the cards differ, the slowest and the smallest decide: {said}"]


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
            self.ray = stack.enter_context(session(cpus=max(2, os.cpu_count() or 2), address=self.settings.address))
            stack.callback(self.dismiss)
            self._muster()
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
        return read_hardware().host_free_bytes if chosen is None else chosen

    @property
    def team(self) -> Team:
        """The nodes, or others in place of those that were lost. Raises EnvironmentBroken where too few are left."""
        assert self.mustered is not None
        lost = self.mustered.team.lost
        if lost is not None:
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
        team.check_head()
        if everywhere:
            parts = repeated(job, team.members)
        else:
            bound = team.bind() if job.world_size > each else {"bound": None}
            if "bound" not in bound:
                return [bound]
            parts = parts_of(job, team.members, each, bound["bound"])
        with shared_folders(parts):
            reports = team.execute(parts, told)
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

    def _muster(self) -> None:
        """Nodes for the ranks, each with a zygote that has loaded everything."""
        self.mustered = muster(
            self.ray,
            self.settings,
            self.listen,
            environment=self.environment,
            within_s=self.within_s,
        )
        for ready in self.mustered.ready():
            self.check(ready)
