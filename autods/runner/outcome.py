"""Turn the nodes' reports of a job into an outcome, and a failure into the error that ends the command."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ..diagnosis.evidence import Evidence, HostUsage, RankEnd
from ..diagnosis.trial_outcome import blame_code_for_hang, explain_failure, make_input_error
from ..errors import AutodsError, EnvironmentBroken, InputError
from ..rank.job import RankJob
from ..rank.record import JobResult, RankResult
from ..rank.step_recorder import relative_error
from ..system.stacks import find_crash
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
)
from .health import find_slowest
from .node_messages import LoadFailed, NodeLost, NodeReport, NodeResult, RankExit, StoreFailed, ZygoteDied

R = TypeVar("R", bound=JobResult)


def judge_trial(
    results: Sequence[NodeResult], job: RankJob, *, wall_s: float, tokens_per_sample: int | None, host_bytes: int | None
) -> Outcome:
    """Return the outcome of a training job. `host_bytes` is the limit of the fullest node's host memory."""
    failure = find_failure(results, job)
    if failure is not None:
        return failure
    reports = [result for result in results if isinstance(result, NodeReport)]
    nodes = [[rank.result for rank in report.ranks if isinstance(rank.result, RankResult)] for report in reports]
    ranks = [result for node in nodes for result in node]
    first = result_of_rank_0(results, RankResult)
    # An optimizer step takes as long as its slowest rank. A script's ranks may differ by one in their steps.
    counted = min(len(rank.step_s) for rank in ranks)
    step_s = tuple(max(times) for times in zip(*(rank.step_s[:counted] for rank in ranks), strict=True))
    samples_per_second = job.train_batch / statistics.median(step_s)
    tokens = tokens_per_sample or statistics.fmean(rank.tokens_per_sample or 0 for rank in ranks)
    build_s, steps_s = max(rank.build_s for rank in ranks), max(rank.steps_s for rank in ranks)
    return Fit(
        memory=_join_memory(reports, nodes, job, host_bytes),
        samples_per_second=samples_per_second,
        tokens_per_second=samples_per_second * tokens if tokens else None,
        step_s=step_s,
        spread=relative_error(step_s),
        losses=first.losses,
        skipped_steps=first.skipped_steps,
        alloc_retries=max(rank.peaks.get("alloc_retries") or 0 for rank in ranks),
        examined=_join_exams([rank.examined for rank in ranks if rank.examined is not None]),
        trained=first.trained,
        update_size=first.update_size,
        gradient_norms=first.gradient_norms,
        card=_join_cards([rank.peaks for rank in ranks]),
        slowest=find_slowest({each.rank: each.forward_s for report in reports for each in report.ranks}),
        communication=_join_communication([rank.communication for rank in ranks if rank.communication is not None]),
        timing=Timing(
            wall_s=wall_s,
            build_s=build_s,
            init_s=max(rank.init_s for rank in ranks),
            steps_s=steps_s,
            overhead_s=wall_s - build_s - steps_s,
        ),
    )


def result_of_rank_0(results: Sequence[NodeResult], kind: type[R]) -> R:
    """Return the result of rank 0, of this kind, in a job that succeeded."""
    ranks = (rank for result in results if isinstance(result, NodeReport) for rank in result.ranks)
    return next(rank.result for rank in ranks if rank.rank == 0 and isinstance(rank.result, kind))


def find_failure(results: Sequence[NodeResult], job: RankJob) -> OutOfMemory | Failed | None:
    """Return why a job failed: a node that died, or the first rank that failed by itself. None: it succeeded."""
    reports = [result for result in results if isinstance(result, NodeReport)]
    failure = _judge_ranks(reports, job)
    for result in results:
        match result:
            case NodeReport(survivors=str(text)) if text:  # they still hold memory, which spoils further trials
                failure = Failed(
                    failure="infrastructure", rank=-1, phase=result.ranks[-1].phase, action="fix_environment",
                    evidence=f"a killed rank is still there after {job.end_s:.0f} s on {text}",
                    advice="it waits for a disk, a network file system or a device, see dmesg; restart the node if "
                    "that does not answer",
                )  # fmt: skip
            case LoadFailed():  # the user's module could not be imported
                rank = RankExit(rank=0, phase="build", step=0, at_s=0.0, exit_code=1, error=result.error)
                failure = explain_failure([evidence_of(rank, job, None)])
            case ZygoteDied():
                failure = _judge_zygote(result)
            case StoreFailed():
                failure = Failed(
                    failure="infrastructure", rank=-1, phase="start", action="fix_environment",
                    evidence=f"the ranks of other nodes cannot reach the first: {result.reason}",
                    advice="`ray status` lists the addresses of the nodes; the first has to listen on its address",
                )  # fmt: skip
            case _:
                continue
        break
    lost = next((result for result in results if isinstance(result, NodeLost)), None)
    return failure if lost is None else _judge_lost_node(lost, failure, reports)


def has_built_once(results: Sequence[NodeResult]) -> bool:
    """Whether a node kept the model in memory for ranks of later trials; without its report that is not known."""
    return any(result.built_once if isinstance(result, NodeReport) else True for result in results)


def lacks_host_memory(outcome: Outcome) -> bool:
    """Whether a trial failed for want of a node's memory: more of it can mend that."""
    if isinstance(outcome, OutOfMemory):
        return outcome.tier in ("host", "pinned")
    return isinstance(outcome, Failed) and outcome.failure == "memory_pressure"


def may_need_all_ranks(results: Sequence[NodeResult], job: RankJob) -> bool:
    """Whether a script failed on one rank in a way that a check of the number of ranks could explain."""
    if not job.source.form.runs_as_main:
        return False
    errors = [rank.error for result in results if isinstance(result, NodeReport) for rank in result.ranks]
    return any(
        not error.contract and {"AssertionError", "ValueError", "RuntimeError"} & set(error.types) for error in errors
    )


def make_error(failure: OutOfMemory | Failed, job: RankJob, log: Path | None = None) -> AutodsError:
    """The error that ends the command where a job failed: InputError for broken user code, else EnvironmentBroken.

    It names `log`, by default that of the rank that failed.
    """
    path = job.source.path
    log = log or Path(job.folder) / f"rank{max(0, failure.rank)}.log"
    if isinstance(failure, OutOfMemory):
        return InputError("the workload does not fit into this machine's memory", place=path)
    if failure.hung_at is not None:  # nothing is run twice here
        failure = blame_code_for_hang(failure)
    if failure.action in ("fix_code", "fix_config"):
        return make_input_error(failure, path, log)
    return EnvironmentBroken(f"{failure.evidence}\n  {failure.advice} (log: {log})")


def _judge_ranks(reports: Sequence[NodeReport], job: RankJob) -> OutOfMemory | Failed | None:
    failed = []
    for report in reports:
        for rank in report.ranks:
            if rank.error.types[:1] == ("Incomparable",):  # losses of different configs: nothing is broken
                return Failed(
                    failure="user_code", rank=rank.rank, phase=rank.phase, step=rank.step,
                    evidence=rank.error.contract or "", action="nothing", advice=rank.error.hint or "",
                )  # fmt: skip
            if not rank.killed_by_us and not rank.succeeded:
                failed.append(evidence_of(rank, job, report.host))
    if failed:
        return explain_failure(failed)
    if any(rank.killed_by_us for report in reports for rank in report.ranks):
        because = next((report.killed_because for report in reports if report.killed_because), "killed")
        return Failed(
            failure="infrastructure", rank=-1, phase="start", evidence=because, action="retry", advice="run it again"
        )
    return None


def evidence_of(rank: RankExit, job: RankJob, host: HostUsage | None) -> Evidence:
    """The evidence of a rank for the diagnosis. `host` is the memory of its node."""
    end = {field.name: getattr(rank, field.name) for field in fields(RankEnd)}
    if not rank.error.types and rank.lost is None:
        frame = find_crash(rank.log_tail)
        end["error"] = replace(rank.error, user_frame=None if frame is None else str(frame))
    return Evidence(device=job.device, limit_bytes=job.limit_bytes, host=host, **end)


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
    reports: Sequence[NodeReport], nodes: Sequence[Sequence[RankResult]], job: RankJob, host_bytes: int | None
) -> dict[Tier, TierUse]:
    """The peak of each tier: of the fullest rank, or of the fullest node where its ranks share the tier."""
    ranks = [rank for node in nodes for rank in node]
    peaks: dict[Tier, int | None] = {
        "device": max(rank.peaks["device"] or 0 for rank in ranks),
        "host": max(sum(_host_peaks(report, node)) for report, node in zip(reports, nodes, strict=True)),
        "pinned": _join_known(max, [rank.peaks["pinned"] for rank in ranks]),
        "nvme": _join_known(max, [report.swap_bytes for report in reports]),
    }
    limits: dict[Tier, int | None] = {"device": job.limit_bytes, "host": host_bytes}
    return {
        tier: TierUse(peak_bytes=peak, limit_bytes=limits.get(tier)) for tier, peak in peaks.items() if peak is not None
    }


def _host_peaks(report: NodeReport, results: Sequence[RankResult]) -> Iterator[int]:
    """The peak of each rank's host memory: it looks between its phases, and the monitor meanwhile."""
    monitored = report.host.peak_rss_bytes if report.host is not None else {}
    for rank, result in zip(report.ranks, results, strict=True):
        private = monitored.get(str(rank.rank), 0)
        yield max(result.peaks["host"] or 0, private + (result.peaks.get("host_offset") or 0) if private else 0)


_EXAM_JOINS: Mapping[str, Callable[[Any], Any]] = {  # a part counts as done only where every rank did it
    "evaluated": all, "gathered": all, "restored": all, "growth_bytes": max, "checkpoint_bytes": max, "save_s": max,
    "load_s": max,
}  # fmt: skip


def _join_exams(exams: Sequence[Examined]) -> Examined | None:
    """The longest batch, the largest checkpoint, the slowest save; None without an exam."""
    if not exams:
        return None
    longest = max(exams, key=lambda exam: math.prod(exam.batch_shape))
    joined = {name: _join_known(join, [getattr(exam, name) for exam in exams]) for name, join in _EXAM_JOINS.items()}
    left_out = tuple(dict.fromkeys(reason for exam in exams for reason in exam.left_out))
    return replace(longest, left_out=left_out, **joined)


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
        reserved_bytes=max((peak["device"] or 0) - (peak["device_beside"] or 0) for peak in peaks),
        nvml_bytes=max(peak["device"] or 0 for peak in peaks),
        in_use_bytes=max(peak["device_in_use"] or 0 for peak in peaks),
    )


def _join_known(join: Callable[..., Any], values: Sequence[Any]) -> Any:
    """Join the values that are not None; None where all are."""
    known = [value for value in values if value is not None]
    return join(known) if known else None
