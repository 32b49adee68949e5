"""Exit codes: how launchers, shells and schedulers report them, and what each one means by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..schema import read_as
from ..types import Action, Tier
from ..units import format_signal
from .rules import expand, read_toml
from .values import Kind

MOST_SIGNAL = 64  # signals of Linux are 1 to 64


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of one process as a log reports it.

    `code` is negative for a signal, as in `subprocess`. `root` is true if the launcher names this process as the first
    that failed.
    """

    code: int
    rank: int | None = None
    root: bool = False
    line: str = ""


@dataclass(frozen=True, slots=True)
class Meaning:
    """The diagnosis that an exit code allows when there is no other evidence: a row of `signatures/exit_codes.toml`."""

    kind: Kind
    action: Action
    summary: str
    advice: str
    tier: Tier | None = None


def normalize_exit_code(code: int) -> int:
    """Signals as `subprocess` reports them: a shell's 137 becomes −9, and so does PBS's 265."""
    added = next((added for added in (128, 256) if added < code <= added + MOST_SIGNAL), None)
    return code if added is None else added - code


def explain_exit_code(code: int) -> Meaning:
    """The meaning of an exit code other than 0."""
    meanings = {name: read_as(Meaning, row) for name, row in read_toml("exit_codes").items()}
    code = normalize_exit_code(code)
    if code >= 0:
        return meanings.get(str(code), meanings["other"])
    name = format_signal(-code)
    return meanings.get(name) or replace(meanings["signal"], summary=f"ended by {name}")


_SIGNALS: Mapping[str, int] = read_toml("fragments")["signal_name"]
_REPORTS = tuple(re.compile(expand(pattern), re.IGNORECASE) for pattern in read_toml("log_lines")["exit_reports"])
_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\)", re.IGNORECASE)
_MPI_RANK = re.compile(r"noticed that process rank (\d+) with PID \d+ on node .* exited on$")
_ROOT_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")


@dataclass(slots=True)
class ExitCodes:
    """Collects the exit codes that the lines of a log report. `root_rank` is torchrun's root cause."""

    exits: list[Exit] = field(default_factory=list)
    root_rank: int | None = None
    _in_root: int = 0  # lines left of torchrun's paragraph on the root cause
    _mpi_rank: int | None = None  # from mpirun's sentence, which continues on the next line
    _listed: int | None = None  # the rank of the entry of torchrun's summary that is being read

    @property
    def first(self) -> Exit | None:
        """The exit that counts: torchrun's root cause, else the first that is no clean-up by the launcher (SIGTERM)."""
        failed = [exit for exit in self.exits if exit.code != 0]
        candidates = [exit for exit in failed if exit.code not in (-15, 143)] or failed
        return next((exit for exit in candidates if exit.root), candidates[0] if candidates else None)

    def read(self, text: str) -> bool:
        """Whether the line reports an exit; if so, it is kept."""
        if _ROOT_CAUSE.search(text):
            self._in_root = 8
            return True
        if mpi_rank := _MPI_RANK.search(text.rstrip()):
            self._mpi_rank = int(mpi_rank[1])
        if root_rank := _ROOT_RANK.match(text):
            self._listed = int(root_rank[1])
        if self._in_root:
            self._in_root -= 1
            if root_rank and self.root_rank is None:
                self.root_rank = self._listed
                return True
        match = next((match for pattern in _REPORTS if (match := pattern.search(text))), None)
        if match is not None:
            self.exits.append(self._parse(match.groupdict(), text))
        return match is not None

    def _parse(self, groups: dict[str, str | None], text: str) -> Exit:
        """The exit that a report names. Its rank may stand in a line before."""
        if name := groups.get("name"):
            code = -_SIGNALS.get(name.lower(), -1)
        elif number := groups.get("code9"):
            code = -int(number)
        else:
            code = normalize_exit_code(int(groups.get("code") or 1))
        rank = self.root_rank if self._in_root else None
        if named := groups.get("rank"):
            rank = int(named)
        elif rank is None and text.lstrip().startswith(("exitcode", "traceback :")):
            rank = self._listed
        elif rank is None and text.startswith("signal "):
            rank, self._mpi_rank = self._mpi_rank, None
        return Exit(code, rank, bool(self._in_root), text.strip()[:300])
