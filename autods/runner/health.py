"""What slows the ranks of a job, or makes it senseless: their devices, the links between them, and one slow rank."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..config.catalogue import Machine
from ..config.deepspeed import precision_name
from ..config.settings import Settings
from ..devices import Finding, Health, Link, find_device
from ..events import Listener, Note
from ..types import Fit, SlowRank
from .node_messages import Heartbeat

_SLOW_RATIO = 1.2  # medians of equal ranks differ by less, also where other work disturbs them
_LOOKS = 3  # in a row: of a few forwards, noise makes one rank the slowest often
_G = 1e9
# The bus bandwidth of an all-reduce, as a share of the links' data sheet, below which something is wrong: half of what
# rings usually reach (`nvlink`, `pcie_between_gpus` and `network` of configs/forecast/step_time.toml, with sources).
_LEAST_OF_NVLINK, _LEAST_OF_PCIE, _LEAST_OF_NETWORK = 0.375, 0.25, 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What was found before the ranks train. `links` says how cards reach each other; '' without cards or with one.

    `reduced_per_s` is the rate of an all-reduce in bytes; None for a single rank.
    """

    findings: tuple[Finding, ...] = ()
    links: str = ""
    reduced_per_s: float | None = None


def describe_cards(settings: Settings, listen: Listener) -> None:
    """Note what the cards of this machine are, and what is slow about the precision there."""
    if settings.address is not None:
        return
    device = find_device(settings.device)
    cards = settings.hardware.cards[: settings.gpus] if device.has_cards else ()
    for note in device.describe_cards(cards):
        listen(Note(text=note))
    if (slow := device.judge_precision(precision_name(settings.base), cards)) is not None:
        listen(Note(text=f"{slow.text}: try {slow.remedy}"))


def judge_nodes(nodes: Sequence[tuple[str, Health]], machine: Machine) -> Preflight:
    """Join the health of nodes, each with its address, '' for a single one. `machine` says which links to expect."""
    findings: list[Finding] = []
    kinds: Counter[Link] = Counter()
    for address, health in nodes:
        place = f"node {address}: " if address else ""
        kinds.update(health.links.values())
        for finding in (*health.findings, *_judge_links(health.links, machine)):
            findings.append(replace(finding, text=place + finding.text))
    pairs = kinds.total()
    links = ", ".join(f"{link} between {count} of {pairs} pairs of cards" for link, count in kinds.most_common())
    return Preflight(findings=tuple(findings), links=links)


def _judge_links(links: Mapping[tuple[int, int], Link], machine: Machine) -> Iterator[Finding]:
    """Yield pairs of cards without NVLink where the machine has it, and pairs that cannot copy to each other."""
    for link in ("PCIe", "host memory"):
        pairs = [f"{first} and {second}" for (first, second), kind in links.items() if kind == link]
        if not pairs:
            continue
        named = f"cards {', '.join(pairs[:3])}" + (f", … ({len(pairs)} pairs)" if len(pairs) > 3 else "")
        if link == "PCIe" and machine.links is not None and not machine.links.over_pcie:
            text = f"{named} reach each other over PCIe, and {machine.title} has {machine.links.between_gpus}"
            yield Finding(text=text, remedy="nvidia-smi nvlink -s shows links that are down")
        elif link == "host memory":
            text = f"{named} cannot copy to each other directly (P2P is off), so all goes through host memory"
            yield Finding(
                text=text, remedy="see nvidia-smi topo -p2p r; turn off ACS or the IOMMU where cards allow it"
            )


def judge_rate(reduced_per_s: float, machine: Machine, *, ranks_per_node: int, nodes: int) -> Finding | None:
    """Return a finding where an all-reduce is slower than half of what the machine's links usually give."""
    links, least = machine.links, dict[str, float]()
    if links is not None and ranks_per_node > 1:  # the makers of links of their own count both directions
        share = _LEAST_OF_PCIE if links.over_pcie else _LEAST_OF_NVLINK / 2
        least[links.between_gpus] = links.between_gpus_gb_per_s * share
    if links is not None and nodes > 1 and links.network is not None and links.network_gb_per_s is not None:
        least[links.network] = links.network_gb_per_s * _LEAST_OF_NETWORK
    link = min(least, key=lambda name: least[name], default="")
    if not link or reduced_per_s >= least[link] * _G:
        return None
    usual = f"{machine.title} usually gives {2 * least[link]:.0f} over {link}"
    text = f"an all-reduce of all ranks moves {reduced_per_s / _G:.3g} GB/s, and {usual}"
    return Finding(text=text, remedy="NCCL_DEBUG=INFO shows the path that NCCL takes, nvidia-smi topo -m the links")


def find_slowest(forward_s: Mapping[int, float]) -> SlowRank | None:
    """Return the rank whose forward takes longest, where that is beyond noise. Those of 0 seconds are unknown."""
    known = {rank: seconds for rank, seconds in forward_s.items() if seconds}
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda rank: known[rank])
    # The lower of two middle ones: the mean of both would hide a ratio between two ranks.
    ratio = known[slowest] / statistics.median_low(known.values())
    return SlowRank(rank=slowest, ratio=ratio) if ratio >= _SLOW_RATIO else None


@dataclass(slots=True)
class Watch:
    """Hears of trials and of heartbeats, and calls `warn` for throttled cards, and once for each slow rank.

    A rank counts as slow when it was so in three looks that follow one another: in a run after `every` steps, else in
    three trials. A run that goes on from a checkpoint counts its steps from there.
    """

    warn: Callable[[str], None]
    every: int = 8  # forwards are many by then
    _last: int | None = None  # the rank that was the slowest at the last look
    _looks: int = 0  # at which it was
    _looked: int | None = None  # the step of it
    _named: set[int] = field(default_factory=set)

    def hear_heartbeat(self, beat: Heartbeat, *, of_run: bool) -> None:
        """Look at the heartbeat of a job that runs."""
        for text in beat.throttled:
            self.warn(text)
        if of_run and (self._looked is None or abs(beat.step - self._looked) >= self.every):
            self._looked = beat.step
            self._look(find_slowest({int(rank): seconds for rank, seconds in beat.forward_s.items()}))

    def hear_trial(self, fit: Fit) -> None:
        """Look at a trial that fitted."""
        self._look(fit.slowest)

    def _look(self, slowest: SlowRank | None) -> None:
        rank = None if slowest is None else slowest.rank
        self._looks = self._looks + 1 if rank == self._last else 1
        self._last = rank
        if slowest is not None and self._looks >= _LOOKS and slowest.rank not in self._named:
            self._named.add(slowest.rank)
            self.warn(str(slowest))
