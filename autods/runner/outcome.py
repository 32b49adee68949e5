"""From what a node reports to an outcome."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..diagnosis.trial_outcome import HostMemory, from_end, outcome_of
from ..trial.job import RankJob
from ..trial.steps import spread_of
from ..types import (
    CardUse,
    Collective,
    Communication,
    Examined,
    Failed,
    Fit,
    Outcome,
    OutOfMemory,
    Tier,
    TierUse,
    Timing,
    Trained,
)


def outcome_from(
    reports: Sequence[Mapping[str, Any]],
    job: RankJob,
    *,
    wall_s: float,
    tokens_per_sample: int | None,
    host_bytes: int | None,
) -> Outcome:
    """The outcome of a training job from the report of each node."""
    failure = failure_from(reports, job)
    if failure is not None:
        return failure
    results = [end["record"]["result"] for report in reports for end in report["ends"]]
    # An optimizer step takes as long as its slowest rank.
    # A script's ranks may have seen one more or less that counts.
    counted = min(len(result["step_s"]) for result in results)
    step_s = tuple(max(times) for times in zip(*(result["step_s"][:counted] for result in results), strict=True))
    samples = job.train_batch
    rate = samples / statistics.median(step_s)
    build_s = max(result["build_s"] for result in results)
    steps_s = max(result["steps_s"] for result in results)
    tokens = tokens_per_sample or max(result.get("tokens_per_sample") or 0 for result in results)  # a script's: as seen
    first = next(end["record"]["result"] for report in reports for end in report["ends"] if end["rank"] == 0)
    return Fit(
        memory=_memory(reports, job, host_bytes),
        samples_per_second=rate,
        tokens_per_second=rate * tokens if tokens else None,
        step_s=step_s,
        spread=spread_of(step_s),
        losses=tuple(first["losses"]),
        alloc_retries=max(result["peaks"].get("alloc_retries") or 0 for result in results),
        examined=_examined([result["examined"] for result in results]),
        trained=Trained(**said) if (said := first.get("trained")) else None,
        card=_card([result["peaks"] for result in results]),
        communication=_communication([said for result in results if (said := result.get("communication"))]),
        timing=Timing(
            wall_s=wall_s,
            build_s=build_s,
            init_s=max(result["init_s"] for result in results),
            steps_s=steps_s,
            overhead_s=wall_s - build_s - steps_s,
        ),
    )


def _examined(said: Sequence[Mapping[str, Any] | None]) -> Examined | None:
    """Of all ranks: the longest batch, the slowest save, and done only where every rank did it."""
    parts = [one for one in said if one is not None]
    if not parts:
        return None
    longest = max(parts, key=lambda one: math.prod(one["batch_shape"]))
    left_out = dict.fromkeys(reason for one in parts for reason in one["left_out"])
    return Examined(
        batch_shape=tuple(longest["batch_shape"]),
        draws=longest["draws"],
        evaluated=all(one["evaluated"] for one in parts),
        left_out=tuple(left_out),
        **{name: _over(max, parts, name) for name in ("checkpoint_bytes", "save_s", "load_s")},
        **{name: _over(all, parts, name) for name in ("gathered", "restored")},
    )


def _communication(said: Sequence[Mapping[str, Any]]) -> Communication | None:
    """Of all ranks: the most calls and bytes. The rank that came last to a collective waited for none in it."""
    if not said:
        return None
    names = dict.fromkeys(name for one in said for name in one["ops"])
    ranks = {name: [one["ops"][name] for one in said if name in one["ops"]] for name in names}
    ops = {
        name: Collective(
            **{key: max(one[key] for one in each) for key in ("calls", "bytes", "sent_bytes")},
            seconds=_over(min, each, "seconds"),
        )
        for name, each in ranks.items()
    }
    return Communication(ops=ops, step_s=_over(max, said, "step_s"))


def _card(peaks: Sequence[Mapping[str, Any]]) -> CardUse | None:
    """Each measure of the rank that has most of it; CPU ranks have no card."""
    if not all("device_allocated" in peak for peak in peaks):
        return None
    seen = [peak["device_card"] for peak in peaks if peak.get("device_card") is not None]
    return CardUse(
        allocated_bytes=max(peak["device_allocated"] for peak in peaks),
        reserved_bytes=max(peak["device"] for peak in peaks),
        nvml_bytes=max(seen, default=None),
    )


def _over(join: Callable[..., Any], parts: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Of the ranks that know it; None where none does."""
    known = [one[name] for one in parts if one[name] is not None]
    return join(known) if known else None


def failure_from(reports: Sequence[Mapping[str, Any]], job: RankJob) -> Outcome | None:
    """What went wrong, if anything did: a node that died, or the first rank that failed by itself."""
    lost = next((report for report in reports if "lost" in report), None)
    if lost is not None:
        return _node_lost(lost, [report for report in reports if "lost" not in report], job)
    for report in reports:
        if "died" in report:
            return _zygote_died(report)
        if "error" in report:  # the user's module could not be imported
            end = {"rank": 0, "phase": "build", "step": 0, "at_s": 0.0, "exit": 1, "record": {"error": report["error"]}}
            return outcome_of([from_end(end, device=job.device, limit_bytes=None)])
    ends = [end for report in reports for end in report["ends"]]
    failed = [
        from_end(end, device=job.device, limit_bytes=job.limit_bytes, host=report.get("host"))
        for report in reports
        for end in report["ends"]
        if not end["killed_by_us"] and not ((end["record"] or {}).get("ok") and end["exit"] == 0)
    ]
    incomparable = next((end for end in ends if _types(end)[:1] == ["Incomparable"]), None)
    if incomparable is not None:
        return _incomparable(incomparable)
    if failed:
        return outcome_of(failed)
    if any(end["killed_by_us"] for end in ends):
        why = next((report["why_killed"] for report in reports if report.get("why_killed")), "killed")
        return Failed(
            failure="infrastructure", rank=-1, phase="start", evidence=str(why), action="retry", advice="run it again"
        )
    return None


def _last(ends: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of the rank that was heard of last."""
    return max(ends, key=lambda end: float(end["at_s"]), default={"phase": "start", "step": 0})


def _node_lost(lost: Mapping[str, Any], others: Sequence[Mapping[str, Any]], job: RankJob) -> Outcome:
    """What ranks of other nodes say of a peer that is gone is no cause; what they died of themselves is."""
    own = failure_from(others, job)
    if isinstance(own, OutOfMemory) or (isinstance(own, Failed) and own.action in ("fix_code", "fix_config")):
        return own
    last = _last([end for report in others for end in report.get("ends", ())])
    said = f"node {lost['address']} was lost in the trial: {lost['lost']}"
    if "low on memory" in lost["lost"]:  # Ray's own memory monitor
        return OutOfMemory(
            tier="host", rank=-1, phase=last["phase"], step=last["step"], evidence=said, action="less_host_memory",
            advice="the node's memory is full: use fewer ranks on a node, or raise Ray's RAY_memory_usage_threshold",
        )  # fmt: skip
    return Failed(
        failure="infrastructure", rank=-1, phase=last["phase"], step=last["step"], evidence=said, action="retry",
        advice="`ray status` says which nodes are left; if it happens again, look at its power, network and dmesg",
    )  # fmt: skip


def _types(end: Mapping[str, Any]) -> list[str]:
    """Of the exception that ended the rank, if one did: the most derived first."""
    types: list[str] = (end["record"] or {}).get("error", {}).get("types", [])
    return types


def _incomparable(end: Mapping[str, Any]) -> Failed:
    """Nothing is broken: this workload's losses cannot be compared between configs."""
    error = end["record"]["error"]
    return Failed(
        failure="user_code", rank=end["rank"], phase=end["phase"], step=end["step"],
        evidence=error["contract"], action="nothing", advice=error["hint"] or "",
    )  # fmt: skip


def _zygote_died(report: Mapping[str, Any]) -> Outcome:
    """The process that forks the ranks was killed; by an OOM killer, if its node's memory says so."""
    host = HostMemory(**report["host"]) if "host" in report else None
    where = {"rank": -1, "phase": report.get("phase", "start"), "step": report.get("step", 0)}
    said = f"the process that forks the ranks died: {report['died']}"
    if host is not None and host.killed and "SIGKILL" in report["died"]:
        return OutOfMemory(
            tier="host", evidence=f"{said}; {host.killed}", limit_bytes=host.limit_bytes, action="less_host_memory",
            advice="the host's memory is full: give the node or its cgroup more memory, or use fewer ranks", **where,
        )  # fmt: skip
    return Failed(
        failure="infrastructure", evidence=said, action="retry",
        advice="if it happens again, look for the kernel's OOM killer: dmesg | grep -i 'killed process'", **where,
    )  # fmt: skip


def _memory(reports: Sequence[Mapping[str, Any]], job: RankJob, host_bytes: int | None) -> dict[Tier, TierUse]:
    peaks = [[end["record"]["result"]["peaks"] for end in report["ends"]] for report in reports]
    memory: dict[Tier, TierUse] = {
        "device": TierUse(
            peak_bytes=max(peak["device"] for node in peaks for peak in node), limit_bytes=job.limit_bytes
        ),
        # Ranks of a node share its host memory.
        "host": TierUse(peak_bytes=max(sum(p["host"] for p in node) for node in peaks), limit_bytes=host_bytes),
    }
    pinned = [peak["pinned"] for node in peaks for peak in node if peak["pinned"] is not None]
    if pinned:
        memory["pinned"] = TierUse(peak_bytes=max(pinned))
    swapped = [report["swap_bytes"] for report in reports if report.get("swap_bytes") is not None]
    if swapped:
        memory["nvme"] = TierUse(peak_bytes=max(swapped))
    return memory
