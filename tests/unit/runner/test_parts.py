from __future__ import annotations

from autods.runner.node_messages import Heartbeat, TierLevel
from autods.runner.parts import Node, RunningPart, find_fullest, join_heartbeats

GIB = 2**30


def part(address, **used):
    """A node with 8 GiB of each tier, of which some are used."""
    tiers = tuple(TierLevel(tier=tier, used_bytes=size * GIB, total_bytes=8 * GIB) for tier, size in used.items())
    running = RunningPart(Node(address=address, agent=None), None, within_s=1.0)
    running.heartbeat = Heartbeat(tiers=tiers)
    return running


def test_the_fullest_node_is_named_tier_by_tier():
    silent = RunningPart(Node(address="10.0.0.3", agent=None), None, within_s=1.0)
    fullest = find_fullest([part("10.0.0.1", host=5, shm=1), part("10.0.0.2", host=3, shm=2), silent])
    assert [(use.tier, use.node, use.used_bytes // GIB) for use in fullest] == [
        ("host", "10.0.0.1", 5),
        ("shm", "10.0.0.2", 2),
    ]


def test_a_single_node_has_no_name():
    assert [use.node for use in find_fullest([part("10.0.0.1", host=5)])] == [""]


def test_a_jobs_heartbeat_has_the_forwards_and_cards_of_all_nodes():
    first, second = part("10.0.0.1", host=5), part("10.0.0.2", host=3)
    first.heartbeat = Heartbeat(step=7, forward_s={"0": 1.0})
    second.heartbeat = Heartbeat(step=6, phase="step", forward_s={"1": 2.0}, throttled=("card 3 is throttled",))
    whole = join_heartbeats([first, second])
    assert (whole.step, whole.phase, whole.forward_s) == (6, "step", {"0": 1.0, "1": 2.0})
    assert whole.throttled == ("node 10.0.0.2: card 3 is throttled",)
    assert join_heartbeats([second]).throttled == ("card 3 is throttled",)
