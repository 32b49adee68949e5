"""Whose check knows that a run was out of memory: autods and four peers on the same corpus, side by side.

pip install --group bench -c constraints.txt
python tests/benchmarks/peers.py [--corpus DIR] [--json]

All are asked: was it a device's memory, so that a smaller step may fit? Right is yes where the corpus says tier device
(its action is leaner_rung), no elsewhere. "memory found" counts the yeses over the cases of out_of_memory, of any tier;
"false alarms" the yeses over the cases that are neither out_of_memory nor memory_pressure. autods alone is also asked
for more: for "memory found" its kind counts, for the rest its tier; "rank" is counted where the corpus knows it.

What each peer really checks, in the versions of constraints.txt:
- accelerate/utils/memory.py:100, should_reduce_batch_size: a RuntimeError with one argument that holds one of five
  strings: " out of memory." (with the dot), MPS', CUDNN_STATUS_NOT_SUPPORTED, DefaultCPUAllocator's, HPU's.
- lightning/pytorch/utilities/memory.py:49, is_oom_error: a RuntimeError with one argument for which one of three holds:
  is_cuda_out_of_memory ("CUDA" and "out of memory"), is_cudnn_snafu, is_out_of_cpu_memory.
- torch_max_mem/api.py:288, is_oom_error: a torch.cuda.OutOfMemoryError, or a RuntimeError that holds one of seven
  strings (api.py:183), or "INTERNAL ASSERT FAILED" with "CUDACachingAllocator" (api.py:205).
- deepspeed/autotuning/utils.py:17, search_error: the first line of a trial's stderr.log with Error, error or ERROR;
  what follows the word, unless it is nothing, is "the error". A trial with an error has no metric (scheduler.py:224),
  and a micro batch without a metric does not fit (autotuner.py:957-978, "binary search until low is the smallest micro
  batch size that OOMs"): no other check exists. A trial that left no metrics.json has no metric either; with that half
  of the rule every failure would be a yes, but a log does not show it, so it is left out.

The peers answer inside a process that got an exception, so they are given the best that they could have seen there. For
each process of a run (a file, or the lines under one rank's prefix) the last exception that nothing superseded is made
again: torch's own type or Python's by its name, all of the message with its further lines as the one argument. Lines
that no prefix tells apart may be of several processes: there each traceback counts. A launcher's own exception is
nobody's. One yes from any process is the tool's yes. Where a line only quotes an exception, that is taken; where there
is none (killed, aborted), nothing was raised, and they say no. DeepSpeed's rule gets the whole log as stderr.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import importlib
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))

from cases import CORPUS, MEMORY, Case, CorpusError, load

INSTALL = "pip install --group bench -c constraints.txt"
BAR = 0.98  # of autods's kinds and actions; of its false alarms none


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    memory: bool
    device: bool
    kind: str | None = None
    action: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    hits: int
    of: int

    @property
    def ratio(self) -> float:
        return self.hits / self.of if self.of else 1.0

    def __str__(self) -> str:
        return f"{self.hits}/{self.of} {self.ratio:4.0%}" if self.of else "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    tool: str
    cases: int
    found: Share
    found_device: Share
    found_host: Share
    found_elsewhere: Share
    false_alarms: Share
    device_or_not: Share
    kind: Share | None = None
    action: Share | None = None
    rank: Share | None = None


Tool = Callable[[Case], Answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="a folder of groups with a cases.toml each")
    parser.add_argument("--json", action="store_true", help="print the rows, and each case's answers, as JSON")
    options = parser.parse_args()
    try:
        cases = load(options.corpus)
    except CorpusError as error:
        sys.exit(f"peers.py: {error}")
    answers = {name: [tool(case) for case in cases] for name, tool in tools().items()}
    rows = [row_of(name, cases, given) for name, given in answers.items()]
    if options.json:
        print(json.dumps({"rows": [shown(row) for row in rows], "cases": told(cases, answers)}, indent=2))
    else:
        print_table(rows)
    sys.exit(not any(passes(row) for row in rows))


def tools() -> dict[str, Tool]:
    """The peers, and autods where it can diagnose. What they print while they are imported is not ours to report."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            from accelerate.utils.memory import should_reduce_batch_size
            from deepspeed.autotuning.utils import search_error
            from lightning.pytorch.utilities.memory import is_oom_error as lightning_check
            from torch_max_mem.api import is_oom_error as max_mem_check
        except ImportError as error:
            sys.exit(f"peers.py: {error}: {INSTALL}")
    found: dict[str, Tool] = {
        f"accelerate {version('accelerate')}": by_exception(should_reduce_batch_size),
        f"lightning {version('lightning')}": by_exception(lightning_check),
        f"torch-max-mem {version('torch-max-mem')}": by_exception(max_mem_check),
        f"deepspeed autotuning {version('deepspeed')}": by_stderr(search_error),
    }
    try:
        from autods import diagnose
    except ImportError as error:
        print(f"peers.py: {error}; autods gets no row", file=sys.stderr)
    else:
        found["autods"] = by_diagnosis(diagnose)
    return found


def by_exception(check: Callable[[Any], bool]) -> Tool:
    def tool(case: Case) -> Answer:
        yes = any(check(error) for error in exceptions(case.files))
        return Answer(memory=yes, device=yes)

    return tool


def by_stderr(search: Callable[[str], str | None]) -> Tool:
    def tool(case: Case) -> Answer:
        with tempfile.TemporaryDirectory(prefix="peers_") as folder:
            stderr = Path(folder) / "stderr.log"
            stderr.write_text("\n".join(case.files.values()), encoding="utf-8", newline="")
            yes = bool(search(str(stderr)))  # scheduler.py:224 asks `if err`
        return Answer(memory=yes, device=yes)

    return tool


def by_diagnosis(diagnose: Callable[..., Any]) -> Tool:
    def tool(case: Case) -> Answer:
        evidence = case.files if len(case.files) > 1 else next(iter(case.files.values()))
        said = diagnose(evidence, exit_code=case.exit_code)
        return Answer(
            memory=said.kind == "out_of_memory",
            device=said.tier == "device",
            kind=said.kind,
            action=said.action,
            rank=said.rank,
        )

    return tool


# ---- what was raised, read back from a log

ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07)")
CLOCK = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (?:std(?:out|err) [FP] )?")  # kubectl's
PREFIX = re.compile(
    r"\[[\w.-]{0,40}\d(?:,\d+)?\](?:<std(?:out|err)>)?: ?"  # [rank1]: of torch, [1,3]<stderr>: of MPI
    r"|\([\w.() -]{1,80} pid=\d+[^)]{0,80}\) ?"  # Ray's
    r"|\[pod/[^\]]{1,120}\] "
    r"|\d{1,5}: |[a-z][\w.-]{0,60}\d[\w.-]{0,60}: "  # srun's, pdsh's
)
RAISED = re.compile(
    r"(?P<name>(?:[A-Za-z_]\w*\.)*(?:[A-Z_]\w*)?(?:Error|Exception|Interrupt|Exit|Failed|OutOfResources))"
    r"(?:\((?P<cause>\w+)\))?(?:: ?(?P<message>.*))?$"
)
# The same within a line; every part is bounded, because a line may be megabytes long.
QUOTED = re.compile(r"(?P<name>(?:\b\w{1,40}\.){0,9}\b[A-Z]\w{0,40}(?:Error|Exception)): (?P<message>.+)$")
SUPERSEDED = ("During handling of the above exception", "The above exception was the direct cause")
# A message ends where something else begins: a traceback, or the head of a log line.
NEXT = re.compile(
    r"\s*$|Traceback \(|\[?\d{4}-\d\d-\d\d|\[?[WEIFC]\d{4}|\[?(?:DEBUG|INFO|WARN|WARNING|ERROR)\b|wandb:|\s*\d+%"
)
MOST_LINES = 40
LAUNCHERS = ("ChildFailedError", "CalledProcessError", "SystemExit")


def exceptions(files: Mapping[str, str]) -> list[BaseException]:
    found: list[tuple[str, str]] = []
    for (_, prefix), lines in processes(files).items():
        raised = list(uncaught(lines))
        found += raised[-1:] if prefix or len(files) > 1 else raised
    if not found:
        quotes = [QUOTED.search(plain(line)) for text in files.values() for line in text.split("\n")]
        found = [(quote["name"], quote["message"]) for quote in quotes if quote][-1:]
    return [exception(name, message) for name, message in found]


def processes(files: Mapping[str, str]) -> dict[tuple[str, str], list[str]]:
    """The lines by file and by what stands in front of them: as far as a log tells its processes apart."""
    found: dict[tuple[str, str], list[str]] = {}
    for file, text in files.items():
        for line in text.split("\n"):
            prefix, rest = split(plain(line))
            found.setdefault((file, prefix), []).append(rest)
    return found


def plain(line: str) -> str:
    """Without colours; of a progress bar's line what stands last."""
    return ESCAPE.sub("", line).rstrip("\r").rpartition("\r")[2]


def split(line: str) -> tuple[str, str]:
    prefix = ""
    while hit := CLOCK.match(line) or PREFIX.match(line):
        if hit.re is PREFIX:
            prefix += hit[0]
        line = line[hit.end() :]
    return prefix.strip(), line


def uncaught(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Name and message of each exception that no later one of its chain replaced."""
    pending: tuple[str, str] | None = None
    for index, line in enumerate(lines):
        if line.startswith(SUPERSEDED):
            pending = None
        elif (hit := RAISED.match(line)) and hit["name"].rpartition(".")[2] not in LAUNCHERS:
            if pending:
                yield pending
            pending = hit["cause"] or hit["name"], "\n".join([hit["message"] or "", *rest(lines, index + 1)])
    if pending:
        yield pending


def rest(lines: Sequence[str], start: int) -> Iterator[str]:
    for line in lines[start : start + MOST_LINES]:
        if NEXT.match(line) or RAISED.match(line):
            return
        yield line


def exception(name: str, message: str) -> BaseException:
    kind = kind_of(name)
    error = kind.__new__(kind)  # some of torch's cannot be made from a message alone
    error.args = (message,)
    return error


def kind_of(name: str) -> type[BaseException]:
    """torch's type, or Python's; another package's counts as a plain Exception: the peers ask for a RuntimeError."""
    home, _, attribute = name.rpartition(".")
    homes = [home] if home.partition(".")[0] == "torch" else [] if home else ["builtins", "torch", "torch.distributed"]
    for module in homes:
        with contextlib.suppress(ImportError, AttributeError):
            kind = getattr(builtins if module == "builtins" else importlib.import_module(module), attribute)
            if isinstance(kind, type) and issubclass(kind, BaseException):
                return kind
    return Exception


# ---- the table


def row_of(tool: str, cases: Sequence[Case], answers: Sequence[Answer]) -> Row:
    pairs = list(zip(cases, answers, strict=True))
    out = [(case, answer.memory) for case, answer in pairs if case.kind == "out_of_memory"]
    own = any(answer.kind is not None for answer in answers)
    return Row(
        tool=tool,
        cases=len(cases),
        found=share(yes for _, yes in out),
        found_device=share(yes for case, yes in out if case.tier == "device"),
        found_host=share(yes for case, yes in out if case.tier == "host"),
        found_elsewhere=share(yes for case, yes in out if case.tier not in ("device", "host")),
        false_alarms=share(answer.device for case, answer in pairs if case.kind not in MEMORY),
        device_or_not=share(answer.device == (case.tier == "device") for case, answer in pairs),
        kind=share(answer.kind == case.kind for case, answer in pairs) if own else None,
        action=share(answer.action == case.action for case, answer in pairs) if own else None,
        rank=share(answer.rank == case.rank for case, answer in pairs if case.rank is not None) if own else None,
    )


def share(hits: Iterator[bool]) -> Share:
    seen = list(hits)
    return Share(hits=sum(seen), of=len(seen))


def passes(row: Row) -> bool:
    if row.kind is None or row.action is None:
        return False
    return not row.false_alarms.hits and row.kind.ratio >= BAR and row.action.ratio >= BAR


def shown(value: Row | Answer) -> dict[str, Any]:
    return {name: each for name, each in asdict(value).items() if each is not None}


def told(cases: Sequence[Case], answers: Mapping[str, Sequence[Answer]]) -> list[dict[str, Any]]:
    labels = ("name", "group", "kind", "tier", "action", "rank")
    return [
        {label: getattr(case, label) for label in labels}
        | {"answers": {tool: shown(given[index]) for tool, given in answers.items()}}
        for index, case in enumerate(cases)
    ]


def print_table(rows: Sequence[Row]) -> None:
    table = Table(title="Was it a device's memory?", box=None, header_style="bold", title_justify="left")
    table.add_column("tool", no_wrap=True)
    for title in ("cases", "memory\nfound", "\ndevice", "\nhost", "pinned,\nshm, nvme"):
        table.add_column(title, justify="right")
    for title in ("false\nalarms", "device\nor not", "\nkind", "\naction", "\nrank"):
        table.add_column(title, justify="right")
    for row in rows:
        found = (row.found, row.found_device, row.found_host, row.found_elsewhere)
        others = (row.false_alarms, row.device_or_not, row.kind, row.action, row.rank)
        table.add_row(row.tool, str(row.cases), *("" if each is None else str(each) for each in (*found, *others)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
