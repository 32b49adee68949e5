"""Turn the nodes' reports of a job into an outcome."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..diagnosis.trial_outcome import Evidence, HostMemory, explain_failure
from ..schema import read_known
from ..trial.job import RankJob
from ..trial.training import relative_spread
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
from .protocol import (
    LoadFailed,
    NodeLost,
    NodeReport,
    NodeResult,
    RankError,
    RankExit,
    RankRecord,
    StoreFailed,
    ZygoteDied,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The measurements of a rank in a training job. `peaks` has bytes and counts, by the meter's names for them."""

    step_s: tuple[float, ...]
    steps_s: float
    losses: tuple[float, ...]
    build_s: float
    init_s: float
    peaks: Mapping[str, int | None]
    examined: Examined | None = None
    communication: Communication | None = None
    trained: Trained | None = None
    tokens_per_sample: int | None = None  # as a script's batches had them

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainResult:
        """Read the result of a rank's record. Raises ValueError where a field is missing or ill-typed."""
        return read_known(cls, data)


def judge_trial(
    results: Sequence[NodeResult],
    job: RankJob,
    *,
    wall_s: float,
    tokens_per_sample: int | None,
    host_bytes: int | None,
) -> Outcome:
    """Return the outcome of a training job. `host_bytes` is the limit of the fullest node's host memory."""
    failure = find_failure(results, job)
    if failure is not None:
        return failure
    reports = [result for result in results if isinstance(result, NodeReport)]
    nodes = [[TrainResult.from_json(rank.result or {}) for rank in report.ranks] for report in reports]
    ranks = [result for node in nodes for result in node]
    # An optimizer step takes as long as its slowest rank. A script's ranks may differ by one in their steps.
    counted = min(len(rank.step_s) for rank in ranks)
    step_s = tuple(max(times) for times in zip(*(rank.step_s[:counted] for rank in ranks), strict=True))
    samples_per_second = job.train_batch / statistics.median(step_s)
    build_s = max(rank.build_s for rank in ranks)
    steps_s = max(rank.steps_s for rank in ranks)
    tokens = tokens_per_sample or max(rank.tokens_per_sample or 0 for rank in ranks)
    first = TrainResult.from_json(result_of_rank_0(results))
    return Fit(
        memory=_join_memory(reports, nodes, job, host_bytes),
        samples_per_second=samples_per_second,
        tokens_per_second=samples_per_second * tokens if tokens else None,
        step_s=step_s,
        spread=relative_spread(step_s),
        losses=first.losses,
        alloc_retries=max(rank.peaks.get("alloc_retries") or 0 for rank in ranks),
        examined=_join_exams([rank.examined for rank in ranks if rank.examined is not None]),
        trained=first.trained,
        card=_join_cards([rank.peaks for rank in ranks]),
        communication=_join_communication([rank.communication for rank in ranks if rank.communication is not None]),
        timing=Timing(
            wall_s=wall_s,
            build_s=build_s,
            init_s=max(rank.init_s for rank in ranks),
            steps_s=steps_s,
            overhead_s=wall_s - build_s - steps_s,
        ),
    )


def result_of_rank_0(results: Sequence[NodeResult]) -> Mapping[str, Any]:
    """Return the result of rank 0 in a job that succeeded."""
    ranks = (rank for result in results if isinstance(result, NodeReport) for rank in result.ranks)
    return next(rank.result for rank in ranks if rank.rank == 0 and rank.result is not None)


def find_failure(results: Sequence[NodeResult], job: RankJob) -> OutOfMemory | Failed | None:
    """Return why a job failed: a node that died, or the first rank that failed by itself. None: it succeeded."""
    lost = next((result for result in results if isinstance(result, NodeLost)), None)
    failure = _judge_nodes([result for result in results if not isinstance(result, NodeLost)], job)
    if lost is None:
        return failure
    return _judge_lost_node(lost, failure, [result for result in results if isinstance(result, NodeReport)])


def _judge_nodes(
    results: Sequence[NodeReport | ZygoteDied | LoadFailed | StoreFailed], job: RankJob
) -> OutOfMemory | Failed | None:
    reports = []
    for result in results:
        match result:
            case NodeReport():
                reports.append(result)
            case LoadFailed():
                return _judge_load(result.error, job)
            case ZygoteDied():
                return _judge_zygote(result)
            case StoreFailed():
                return Failed(
                    failure="infrastructure", rank=-1, phase="start", action="fix_environment",
                    evidence=f"the ranks of other nodes cannot reach the first: {result.reason}",
                    advice="`ray status` lists the addresses of the nodes; the first has to listen on its address",
                )  # fmt: skip
    return _judge_ranks(reports, job)


def _judge_ranks(reports: Sequence[NodeReport], job: RankJob) -> OutOfMemory | Failed | None:
    incomparable = next((rank for report in reports for rank in report.ranks if _is_incomparable(rank)), None)
    if incomparable is not None:
        return Failed(
            failure="user_code", rank=incomparable.rank, phase=incomparable.phase, step=incomparable.step,
            evidence=incomparable.error.contract or "", action="nothing", advice=incomparable.error.hint or "",
        )  # fmt: skip
    failed = [
        evidence_of(rank, job, report.host)
        for report in reports
        for rank in report.ranks
        if not rank.killed_by_us and not rank.succeeded
    ]
    if failed:
        return explain_failure(failed)
    if any(rank.killed_by_us for report in reports for rank in report.ranks):
        because = next((report.killed_because for report in reports if report.killed_because), "killed")
        return Failed(
            failure="infrastructure", rank=-1, phase="start", evidence=because, action="retry", advice="run it again"
        )
    return None


def evidence_of(rank: RankExit, job: RankJob, host: HostMemory | None) -> Evidence:
    """The evidence of a rank for the diagnosis. `host` is the memory of its node."""
    record, error = rank.record, rank.error
    return Evidence(
        rank=rank.rank,
        phase=rank.phase,
        step=rank.step,
        at_s=rank.at_s,
        device=job.device,
        limit_bytes=job.limit_bytes,
        exit=rank.exit_code,
        lost=rank.lost,
        types=error.types,
        message=error.message,
        traceback=error.traceback,
        causes=error.causes,
        user_frame=error.user_frame,
        contract=error.contract,
        hint=error.hint,
        free_bytes=record.free_bytes if record is not None else None,
        log_tail=rank.log_tail,
        host=host,
        idle_bytes=record.idle_bytes if record is not None else None,
    )


def _is_incomparable(rank: RankExit) -> bool:
    """Whether the workload's losses cannot be compared between configs: nothing is broken."""
    return rank.error.types[:1] == ("Incomparable",)


def _judge_load(error: RankError, job: RankJob) -> OutOfMemory | Failed:
    """The user's module could not be imported."""
    record = RankRecord(phase="build", step=0, at_s=0.0, error=error)
    rank = RankExit(rank=0, phase="build", step=0, at_s=0.0, exit_code=1, record=record)
    return explain_failure([replace(evidence_of(rank, job, None), limit_bytes=None)])


def _judge_zygote(died: ZygoteDied) -> OutOfMemory | Failed:
    """The process that forks the ranks was killed; by an OOM killer, if its node's memory shows that."""
    text = f"the process that forks the ranks died: {died.how}"
    if died.host is not None and died.host.oom_kill_evidence and "SIGKILL" in died.how:
        return OutOfMemory(
            tier="host", rank=-1, phase=died.phase, step=died.step, evidence=f"{text}; {died.host.oom_kill_evidence}",
            limit_bytes=died.host.limit_bytes, action="less_host_memory",
            advice="the host's memory is full: give the node or its cgroup more memory, or use fewer ranks",
        )  # fmt: skip
    return Failed(
        failure="infrastructure", rank=-1, phase=died.phase, step=died.step, evidence=text, action="retry",
        advice="if it happens again, look for the kernel's OOM killer: dmesg | grep -i 'killed process'",
    )  # fmt: skip


def _judge_lost_node(
    lost: NodeLost, failure: OutOfMemory | Failed | None, reports: Sequence[NodeReport]
) -> OutOfMemory | Failed:
    """A failure of the other nodes' ranks is the cause only where it cannot come from the loss of their peers."""
    if isinstance(failure, OutOfMemory) or (failure is not None and failure.action in ("fix_code", "fix_config")):
        return failure
    last = max((rank for report in reports for rank in report.ranks), key=lambda rank: rank.at_s, default=None)
    phase, step = (last.phase, last.step) if last is not None else ("start", 0)
    text = f"node {lost.address} was lost in the trial: {lost.how}"
    if "low on memory" in lost.how:  # Ray's memory monitor
        return OutOfMemory(
            tier="host", rank=-1, phase=phase, step=step, evidence=text, action="less_host_memory",
            advice="the node's memory is full: use fewer ranks on a node, or raise Ray's RAY_memory_usage_threshold",
        )  # fmt: skip
    return Failed(
        failure="infrastructure", rank=-1, phase=phase, step=step, evidence=text, action="retry",
        advice="`ray status` lists the nodes that are left; if it happens again, check its power, network and dmesg",
    )  # fmt: skip


def _join_memory(
    reports: Sequence[NodeReport], nodes: Sequence[Sequence[TrainResult]], job: RankJob, host_bytes: int | None
) -> dict[Tier, TierUse]:
    """The peak of each tier: of the fullest rank, or of the fullest node where its ranks share the tier."""
    ranks = [rank for node in nodes for rank in node]
    memory: dict[Tier, TierUse] = {
        "device": TierUse(peak_bytes=max(rank.peaks["device"] or 0 for rank in ranks), limit_bytes=job.limit_bytes),
        "host": TierUse(
            peak_bytes=max(sum(rank.peaks["host"] or 0 for rank in node) for node in nodes), limit_bytes=host_bytes
        ),
    }
    pinned = [peak for rank in ranks if (peak := rank.peaks["pinned"]) is not None]
    if pinned:
        memory["pinned"] = TierUse(peak_bytes=max(pinned))
    swapped = [report.swap_bytes for report in reports if report.swap_bytes is not None]
    if swapped:
        memory["nvme"] = TierUse(peak_bytes=max(swapped))
    return memory


def _join_exams(exams: Sequence[Examined]) -> Examined | None:
    """The longest batch, the slowest save; a part counts as done only where every rank did it."""
    if not exams:
        return None
    longest = max(exams, key=lambda exam: math.prod(exam.batch_shape))
    return Examined(
        batch_shape=longest.batch_shape,
        draws=longest.draws,
        evaluated=all(exam.evaluated for exam in exams),
        checkpoint_bytes=_join_known(max, [exam.checkpoint_bytes for exam in exams]),
        save_s=_join_known(max, [exam.save_s for exam in exams]),
        load_s=_join_known(max, [exam.load_s for exam in exams]),
        gathered=_join_known(all, [exam.gathered for exam in exams]),
        restored=_join_known(all, [exam.restored for exam in exams]),
        left_out=tuple(dict.fromkeys(reason for exam in exams for reason in exam.left_out)),
    )


def _join_communication(ranks: Sequence[Communication]) -> Communication | None:
    """The most calls and bytes, the shortest time: the rank that comes last to a collective does not wait in it."""
    if not ranks:
        return None
    ops = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank.ops):
        collectives = [rank.ops[name] for rank in ranks if name in rank.ops]
        ops[name] = Collective(
            calls=max(op.calls for op in collectives),
            bytes=max(op.bytes for op in collectives),
            sent_bytes=max(op.sent_bytes for op in collectives),
            seconds=_join_known(min, [op.seconds for op in collectives]),
        )
    return Communication(ops=ops, step_s=_join_known(max, [rank.step_s for rank in ranks]))


def _join_cards(peaks: Sequence[Mapping[str, int | None]]) -> CardUse | None:
    """Each measure on the rank that has most of it; None for CPU ranks."""
    if not all("device_allocated" in peak for peak in peaks):
        return None
    return CardUse(
        allocated_bytes=max(peak["device_allocated"] or 0 for peak in peaks),
        reserved_bytes=max(peak["device"] or 0 for peak in peaks),
        nvml_bytes=_join_known(max, [peak.get("device_card") for peak in peaks]),
    )


def _join_known(join: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Join the values that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return join(known) if known else None
