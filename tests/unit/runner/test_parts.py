from __future__ import annotations

from autods.rank.job import RankJob
from autods.runner.node_messages import Heartbeat, TierLevel
from autods.runner.parts import Node, RunningPart, await_each_other, find_fullest, join_heartbeats
from autods.system.waiting import MOST_LIMITS
from autods.types import PHASES, WorkloadSource

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


def test_nodes_that_all_wait_for_other_ranks_wait_for_each_other():
    job = RankJob(
        job="run", source=WorkloadSource(kind="file", path="/model.py", name="model", digest=""), device="cpu",
        folder="/out", scratch="/out/scratch", silence_s=dict.fromkeys(PHASES, 10.0),
    )  # fmt: skip
    first, second = part("10.0.0.1"), part("10.0.0.2")
    long_s = 10.0 * MOST_LIMITS + 1
    for awaits_s, other_s, expected in ((long_s, long_s, True), (long_s, 5.0, False), (long_s, 0.0, False)):
        first.heartbeat = Heartbeat(phase="script", awaits_s=awaits_s)
        second.heartbeat = Heartbeat(phase="script", awaits_s=other_s)
        assert await_each_other([first, second], job) is expected
    assert not await_each_other([first], job)
    second.heartbeat, second.result = Heartbeat(phase="script", awaits_s=long_s), "it has ended"
    assert not await_each_other([first, second], job)
