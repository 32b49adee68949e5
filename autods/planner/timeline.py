"""A forecast's step as a trace for Perfetto or chrome://tracing: streams, the host's thread, and memory by kind.

The clocks are those of `forecast.predict.step_time`; an observer looks at them between two events. Times are in
microseconds from the beginning of the step. The host may be far ahead of the device, so phases and memory follow the
default stream. A tensor is shown from the moment at which that stream comes to its first kernel.
"""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import OutputFile, write_whole
from ..forecast.predict.prices import PriceList, Work
from ..forecast.predict.step_time import (
    BITS,
    BOUNDS,
    CODES,
    HOST,
    RUN,
    STREAMS,
    SWITCH,
    WAIT,
    Bound,
    Schedule,
    StepClocks,
)
from ..forecast.values import KINDS, EngineSpec, Simulation, Trace

_PHASES_THREAD, _HOST_THREAD, _FIRST_STREAM = 0, 1, 2  # a stream's thread is its number after these
_ROUNDING_S = 1e-12
_COUNTED = 2000  # moments of a step at which the memory is shown, besides its highest
Event = dict[str, Any]


def name_timeline(path: str | os.PathLike[str]) -> OutputFile:
    """The file of --timeline, for `check_outputs`."""
    return OutputFile("--timeline", path, (b'{"traceevents"', b"\x1f\x8b"))


def write_timeline(simulation: Simulation, spec: EngineSpec, path: Path) -> None:
    """Write the trace of the simulation's last step; compressed if the file's name ends in .gz.

    Raises Unpriced where the machine lacks a rate, and InputError where the file cannot be written.
    """
    text = json.dumps(build_timeline(simulation, spec), separators=(",", ":"))
    write_whole(path, gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text)


def build_timeline(simulation: Simulation, spec: EngineSpec) -> dict[str, Any]:
    """Return the trace as JSON values, in the trace event format. Raises Unpriced."""
    schedule, machine = simulation.schedule, spec.machine
    assert schedule is not None
    assert machine is not None
    prices = PriceList.usual(machine, spec.ranks_of_node)
    observer = _Observer(schedule, StepClocks(schedule, prices))
    slices = observer.observe()
    trace = simulation.traces["device"]
    phases = list(_list_phases(trace, schedule, observer))
    memory = _count_memory(trace, schedule, observer)
    name = f"rank 0 of {spec.world_size}: {spec.rung}, micro batch {simulation.micro_batch}, {machine.title}"
    metadata = {
        "step_seconds": observer.end_s,
        "micro_batches": len(observer.clocks.micro_batches) + 1,
        "spent": {cause: observer.clocks.spent[cause] for cause in BOUNDS},
        "memory": "live tensors of the device by kind, without the allocator's cache and the CUDA context",
    }
    events = [*_name_threads(name, schedule, slices), *sorted([*slices, *phases], key=_order), *memory]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


def _order(event: Event) -> tuple[int, float]:
    return event["tid"], event["ts"]


def _slice(thread: int, name: str, category: str, begin_s: float, end_s: float, **args: Any) -> Event:
    """A complete event; its end is rounded like the beginning of the next one, so that they never overlap."""
    begin, end = round(begin_s * 1e6, 3), round(end_s * 1e6, 3)
    event = {"ph": "X", "pid": 0, "tid": thread, "ts": begin, "dur": round(end - begin, 3), "name": name}
    return {**event, "cat": category, "args": args} if args else {**event, "cat": category}


class _Observer:
    """Looks at the clocks of a replay after each event, and notes what every stream and the host did meanwhile."""

    def __init__(self, schedule: Schedule, clocks: StepClocks) -> None:
        self.schedule, self.clocks = schedule, clocks
        self.moments: list[float] = []  # before each event: when the host and the default stream have come there
        self.end_s = 0.0
        self._slices: list[Event] = []
        self._spent: Mapping[Bound, float] = {}  # after the last event
        self._args = [_describe(work, cause) for work, cause in zip(schedule.works, clocks.causes, strict=True)]

    def observe(self) -> list[Event]:
        """Replay the schedule; return the slices of all threads."""
        self.end_s = self.clocks.run(self._pass_on()).seconds
        begin = self.clocks.streams[0]
        if self.end_s > begin:
            spent = self._find_spent(self._spent)
            self._add(_FIRST_STREAM, "idle until the step ends", "wait", begin, self.end_s, **spent)
        return self._slices

    def _add(self, thread: int, name: str, category: str, begin_s: float, end_s: float, **args: Any) -> None:
        self._slices.append(_slice(thread, name, category, begin_s, end_s, **args))

    def _pass_on(self) -> Iterator[int]:
        """Yield the events. When the replay asks for the next one, the clocks show what the last one did."""
        clocks, current = self.clocks, 0
        streams = clocks.streams
        for event in self.schedule.events:
            code, argument = event & CODES, event >> BITS
            host, default, before = clocks.host, streams[0], dict(clocks.spent)
            waiting = argument & STREAMS if code == WAIT else current
            stood = streams[waiting]
            self.moments.append(max(host, default))
            yield event
            if code == SWITCH:
                current = argument
            elif code == RUN:
                self._note_work(argument, current, host, stood, before)
                if current and streams[0] > default:
                    name = "slowed by a collective"
                    self._add(_FIRST_STREAM, name, "communication", default, streams[0])
            elif code == HOST:
                work = self.schedule.works[argument]
                self._add(_HOST_THREAD, _name(work), "host", host, clocks.host, **self._args[argument])
            elif code == WAIT:
                if streams[waiting] > stood:
                    spent = self._find_spent(before) if waiting == 0 else {}
                    self._add(_FIRST_STREAM + waiting, "waits for a stream", "wait", stood, streams[waiting], **spent)
            elif clocks.host > host:
                self._add(_HOST_THREAD, "waits for the device", "wait", host, clocks.host)
        self._spent = dict(clocks.spent)

    def _note_work(self, number: int, stream: int, host: float, stood: float, before: Mapping[Bound, float]) -> None:
        """A work that the host launched, and the gap that the stream had until it was launched."""
        clocks, work = self.clocks, self.schedule.works[number]
        seconds, cause = clocks.seconds[number], clocks.causes[number]
        if clocks.host > host and seconds:
            self._add(_HOST_THREAD, f"launch {_name(work)}", "launch", host, clocks.host)
        if not seconds:
            return
        end = clocks.streams[stream]
        begin = end - seconds
        if stream == 0 and begin > stood + _ROUNDING_S:
            spent = self._find_spent(before)
            spent[cause] = spent.get(cause, 0.0) - seconds
            known = {name: part for name, part in spent.items() if part > _ROUNDING_S}
            self._add(_FIRST_STREAM, "waits for the host", "wait", stood, begin, **known)
        self._add(_FIRST_STREAM + stream, _name(work), cause, begin, end, **self._args[number])

    def _find_spent(self, before: Mapping[Bound, float]) -> dict[str, float]:
        """Seconds of the default stream that the last event added, by cause."""
        spent = self.clocks.spent
        return {cause: spent[cause] - before[cause] for cause in BOUNDS if spent[cause] > before[cause]}


def _name(work: Work) -> str:
    """'mm', 'collective' where an operator's name is not known."""
    return work.name or work.kind


def _describe(work: Work, cause: str) -> dict[str, Any]:
    args: dict[str, Any] = {"kind": work.kind, "bound by": cause, "bytes": work.bytes}
    if work.flops:
        args |= {"FLOPs": work.flops, "dtype": work.dtype}
    return args | ({"ranks": work.ranks} if work.kind == "collective" else {})


def _name_threads(process: str, schedule: Schedule, slices: Iterable[Event]) -> Iterator[Event]:
    """Metadata: the names of the process and of its threads, in their order."""
    kinds: defaultdict[int, set[str]] = defaultdict(set)
    for event in slices:
        if "args" in event and "kind" in event["args"]:
            kinds[event["tid"]].add(event["args"]["kind"])
    names = {_PHASES_THREAD: "phases", _HOST_THREAD: "host", _FIRST_STREAM: "default stream"}
    for thread in sorted({event["tid"] for event in slices} - set(names)):
        number = thread - _FIRST_STREAM
        carries = "collectives" if kinds[thread] == {"collective"} else "copies" if _only_copies(kinds[thread]) else ""
        names[thread] = "NVMe" if number == STREAMS else f"stream {number}{carries and ': ' + carries}"
    yield {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": process}}
    for thread, name in sorted(names.items()):
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _only_copies(kinds: set[str]) -> bool:
    return bool(kinds) and kinds <= {"copy", "pageable_copy"}


def _find_moment(observer: _Observer, schedule: Schedule, issued: int) -> float:
    """When the device came to the work that follows so much issued work; below 0 before the step."""
    index = issued - schedule.first
    if index < 0:
        return -1.0
    return observer.moments[index] if index < len(observer.moments) else observer.end_s


def _list_phases(trace: Trace, schedule: Schedule, observer: _Observer) -> Iterator[Event]:
    """Slices of forward, backward and step."""
    begun = [
        (_find_moment(observer, schedule, trace.issued[count]), phase)
        for count, phase in trace.marks
        if count < len(trace.issued)
    ]
    begun = [(max(0.0, moment), phase) for moment, phase in begun if moment >= 0]
    ends = [*(moment for moment, _ in begun), observer.end_s][1:]
    for (moment, phase), end in zip(begun, ends, strict=True):
        if end > moment:
            yield _slice(_PHASES_THREAD, phase, "phase", moment, end)


def _count_memory(trace: Trace, schedule: Schedule, observer: _Observer) -> Iterator[Event]:
    """Counters of live bytes by kind, at the fullest moment of each short span."""
    if not trace.issued:
        return
    live, sizes = [0] * len(KINDS), [event for event in trace.events if event >= 0]
    span, shown, fullest = observer.end_s / _COUNTED or 1.0, 0, (0.0, list(live))
    block = 0
    for event, issued in zip(trace.events, trace.issued, strict=True):
        if event >= 0:
            live[trace.kinds[block]] += event
            block += 1
        else:
            live[trace.kinds[~event]] -= sizes[~event]
        moment = max(0.0, _find_moment(observer, schedule, issued))
        if int(moment / span) > shown:
            yield _counter(*fullest)
            shown, fullest = int(moment / span), (moment, list(live))
        elif sum(live) >= sum(fullest[1]):
            fullest = max(moment, fullest[0]), list(live)
    yield _counter(*fullest)
    yield _counter(observer.end_s, live)


def _counter(moment: float, live: list[int]) -> Event:
    args = dict(zip(KINDS, live, strict=True))
    return {"ph": "C", "pid": 0, "ts": round(moment * 1e6, 3), "name": "live bytes", "args": args}
