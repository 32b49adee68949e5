"""A device: what autods has to know of the kind of hardware that ranks run on, and the cards that a driver lists."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..units import format_bytes

# Settings of torch's caching allocator.
EXPANDABLE = "expandable_segments:True"
MEMORY_SHARE = "per_process_memory_fraction"  # from torch 2.10 on; how much of a card it may reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU or MIG slice that a process sees.

    `index` is the driver's number, or the place of a slice on its card. `total_bytes` is the memory for programs,
    without the driver's reserve. Other processes hold `others_bytes`. `pids` are those that this user may see.
    `bf16` is False for a card that computes in fp16 and only emulates bf16. `capability` is its compute capability.
    """

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    others_bytes: int = 0
    pids: tuple[int, ...] = ()
    uuid: str | None = None
    slice: bool = False
    bf16: bool = True
    capability: tuple[int, int] | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that a rank may use."""
        return self.total_bytes - self.others_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CardReading:
    """The cards that this process sees, and what runs them.

    `driver` is the version of the driver, `cuda` the newest CUDA that it runs, such as '13.0'. `unusable` says why
    torch cannot use the cards, with the command that fixes it.
    """

    cards: tuple[Card, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    unusable: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about a machine that slows its ranks, or with `is_fatal` makes their work senseless; and what helps."""

    text: str
    remedy: str
    is_fatal: bool = False

    def __str__(self) -> str:
        return f"{self.text} ({self.remedy})"


# How two cards of a node reach each other: by a link of their own, over PCIe, or through host memory alone.
Link = Literal["NVLink", "PCIe", "host memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a node's driver and kernel say of the devices of its ranks. `links` has each pair of cards, by number."""

    findings: tuple[Finding, ...] = ()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device. The fields answer what differs between kinds; a device with a driver overrides methods.

    Values that are written to files or sent to other processes hold the `name` alone; `find_device` returns the rest.
    """

    # The word of `--device`, of journals and of reports. DeepSpeed and torch use it, too.
    name: str
    # The backend of torch.distributed.
    backend: str
    # Each rank has a card of its own, which the driver lists. Without cards, the request says how many ranks there are.
    has_cards: bool
    # What people call a card: 'CUDA GPU'.
    card_noun: str = ""
    # Ray's name of the resource that a rank takes one of.
    ray_resource: str
    # A rank's device memory is host memory. So its budget is a share of the node's, and host memory has no other limit.
    shares_host_memory: bool
    # torch's caching allocator serves the device: freed blocks stay reserved, and a limit makes it give them back.
    # Otherwise malloc serves it.
    has_caching_allocator: bool
    # The variables with the settings of that allocator: the first that is set counts. Every torch knows the last.
    allocator_variables: tuple[str, ...] = ()
    # Whose rows of configs/forecast/constants.toml count. A device without measurements may take those of another.
    constants: str
    # The class that limits and measures a rank's memory, as 'module:class': it may import torch, and a device may not.
    meter: str
    # Ranks stand in for GPUs: what a script asks of its GPU is answered without one.
    stands_in: bool = False
    # A process that has used the device may still be forked, so that ops can be loaded before the ranks are.
    survives_fork: bool = False
    # A pattern for the names of threads that its driver starts in this process, and that do no harm in a fork.
    driver_threads: str = ""
    # Ops of DeepSpeed that ranks do without, though DeepSpeed would build them.
    omitted_ops: tuple[str, ...] = ()
    # The variables of each rank, whatever the user's environment says; then those that the user may set otherwise.
    variables: Mapping[str, str] = field(default_factory=dict)
    default_variables: Mapping[str, str] = field(default_factory=dict)
    # The variable that names the cards which a process sees.
    visible_variable: str | None = None
    # The bytes of the all-reduce that measures the links between ranks: enough that the rate no longer rises.
    reduced_bytes: int = 16 * 2**20
    # How variables begin that change nothing on this device.
    idle_variables: tuple[str, ...] = ()
    # The variables before a command that launches the training by hand.
    launch_variables: Mapping[str, str] = field(default_factory=dict)
    # Folders of the home folder in which the driver and compilers for the device keep their results.
    cache_folders: tuple[str, ...] = ()
    # What to do about a rank that no longer moves, beyond looking at its stack.
    hang_advice: str = ""

    def list_resources(self, ranks: int, *, shared: bool) -> dict[str, float]:
        """Return what so many ranks of a node take of Ray, with a CPU for their agent.

        On a cluster that is `shared`, ranks without cards take a CPU each. Nobody else uses a Ray of our own.
        """
        if self.has_cards:
            return {"CPU": 1.0, self.ray_resource: float(ranks)}
        return {self.ray_resource: float(ranks) if shared else 1.0}

    def find_allocator_variable(self, environment: Mapping[str, str]) -> str | None:
        """Return the variable of an environment whose settings the device's allocator takes; None where none is set."""
        return next((name for name in self.allocator_variables if environment.get(name)), None)

    def set_allocator(self, environment: Mapping[str, str], *settings: str) -> dict[str, str]:
        """Return the variable by which its allocator gets these settings, beside those in this environment.

        It is empty without settings, and for a device without such an allocator.
        """
        if not self.allocator_variables or not settings:
            return {}
        variable = self.find_allocator_variable(environment) or self.allocator_variables[-1]
        return {variable: ",".join(filter(None, (environment.get(variable), *settings)))}

    def complete_environment(self, variables: Mapping[str, str], assigned: str | None) -> dict[str, str]:
        """Return the environment of a node's ranks: `variables` with those of the device.

        `assigned` is the visible variable as Ray has set it for the node's agent, which names the cards in any order.
        Ranks get them in the order of `variables`, the user's, or else by number.
        """
        complete = {**self.default_variables, **variables, **self.variables}
        if self.visible_variable is not None and assigned is not None:
            order = variables.get(self.visible_variable, "").split(",")
            complete[self.visible_variable] = ",".join(
                sorted(
                    assigned.split(","),
                    key=lambda name: (order.index(name) if name in order else len(order), len(name), name),
                )
            )
        return complete

    def read_cards(self) -> CardReading:
        """Return the cards that this process sees."""
        return CardReading()

    def find_numa_nodes(self) -> tuple[int | None, ...]:
        """Return the NUMA node of each card that this process sees; None for one that does not tell."""
        return ()

    def find_memory_nodes(self) -> frozenset[int]:
        """Return the NUMA nodes that the kernel has made of cards' memory; they count as the host's, but are not."""
        return frozenset()

    def read_used_bytes(self) -> tuple[int, ...] | None:
        """Return the used bytes of each visible card, by all processes; None where the driver does not tell."""
        return None

    def examine(self, ranks: int) -> Health:
        """Return the health of what so many ranks are about to use here, before they start; takes under a second."""
        return Health()

    def find_throttled(self) -> tuple[str, ...]:
        """Return a sentence for each card that runs slower now than it could. It is asked every few seconds."""
        return ()

    def find_fork_hazard(self) -> str | None:
        """Return why ranks must not be forked from this process, which has used the device; None if they may be."""
        return None

    def describe_cards(self, cards: Iterable[Card]) -> tuple[str, ...]:
        """Return sentences about these cards that their user should know before a fit."""
        return ()

    def judge_precision(self, precision: str, cards: Iterable[Card]) -> Finding | None:
        """Return what is slow about training in this precision here, on these cards; None where nothing is."""
        return None


def describe_shared_cards(cards: Iterable[Card]) -> tuple[str, ...]:
    """Return a sentence for each card that other processes use as well."""
    sentences = []
    for card in cards:
        if card.others_bytes:
            pids = f" (pid {', '.join(map(str, card.pids))})" if card.pids else ""
            sentences.append(
                f"card {card.index} ({card.name}): other processes{pids} hold {format_bytes(card.others_bytes)} of its "
                f"{format_bytes(card.total_bytes)}, {format_bytes(card.usable_bytes)} are left for a rank"
            )
    return tuple(sentences)
