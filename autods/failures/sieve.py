"""Which lines of a log are worth reading: those with one of `WORDS`; of lines that are alike, the first ones."""

from __future__ import annotations

from collections import Counter

from .clock import SPAN

# A line without any of these is neither a failure nor the end of a run; a test holds every signature's example to it.
_WORDS = """
error, exception, traceback, fail, memory, kill, signal, abort, fault, fatal, oom, quota, cannot, can't,
couldn't, unable, unavailable, timeout, timed, terminat, exit, died, dead, crash, assert, panic, refused,
reset, closed, mismatch, invalid, unsupported, supported, missing, denied, xid, ecc, preempt, cancel, limit,
interrupt, evict, bad_alloc, sigterm, dumped, undefined, incompat, require, unrecognized, unexpected,
unhandled, insufficient, exhaust, lost, stuck, warn, train_runtime, success, complete, finish, stopped,
flushes, alloc, retries, root cause, local_rank, return code, too many, too long, not found, no such, no space,
not equal, not match, is not, must be, expected , out of , out_of_, nan , is nan, nan loss, stopping, overflow, illegal,
no module, percent =, errno, corrupt, truncated, unreachable, hang, desync, stale, broken, exceed, rejected, plugin,
low on, bytes !=, nbytes, aio , nccl, wrong, struct, override, ssh, key, ei00, skipping, slurm, file too,
disconnect, halt, reboot, shutting, gave up, giving up, suspend, exceptio, world_rank, [rank=, .log, ==>,
bound , ulimit, too old, newer, older, usage:, conflict, reclaim, held, maintenance, expired, revoked,
forbidden, unauthorized, unresponsive, drain, deadline, ranks, not ready, unhealthy,
not , full, shm, mlock, page-lock, page lock, pinned, walltime, max wall, max run,  bus,  down, spot , sigh,
sigint, sigx, sigseg, sigbus, enospc, pcie, buffer, divisible, install, batch size, batch_size, leaked, address,
srcindex, ibv_, completion, mlx5, fork, peer, ran for, watchdog, rendezvous, tcpstore, joined, resolve,
bootstrap, non-finite, inf or, nan/, loss is, diverge, usage of, buy new, enough, libcu, ptxas, glibc, gpus
available, more than, int_max, 32-bit, too big, ctrl-c, user request, requeue, read-only, permitted,
inconsistency, larger machine, retirement, remapping, machine check, emfile, descriptor, misaligned, disk ,
stack smash, no gpu, no cuda, no nvidia, getaddrinfo, servname, another rank, other rank, end of file, heap
space, all available, paging file, gateway, unavail, busy,
world info, nnodes, num_machines, pid
"""
_ALL = tuple(word.encode() for word in " ".join(_WORDS.split("\n")).strip(" ").split(", "))
WORDS = tuple(word for word in _ALL if not any(other in word for other in _ALL if other != word))

_REPEATS = 12  # lines that differ only in their digits are read this often
_WHO = 4000  # lines that tell which process has which rank are read this often
_SHAPES = 100_000
_MANY = 4000  # lines read: from here on lines are alike that have the same words
_MANY_ALIKE = 200
_NOTHING = hash(())
_HEX = b"0123456789abcdefABCDEF"


class Sieve:
    """Of one file; it counts what it was asked about."""

    def __init__(self) -> None:
        self._shapes: Counter[int] = Counter()
        self._alike: Counter[int] = Counter()
        self._read = 0

    def keeps(self, raw: bytes, lowered: bytes) -> bool:
        """Whether the line may tell something, and lines like it were not kept often already. lowered: in lower case.

        Alike are lines that differ in their digits only. In a log where too many differ otherwise (hashes, paths),
        alike are those that differ in what a hash is made of, or that have the same of `WORDS`.
        """
        shape = hash(raw.translate(None, b"0123456789"))
        if len(self._shapes) > _SHAPES:
            self._shapes.clear()
        self._shapes[shape] += 1
        often = self._shapes[shape]
        if often > _REPEATS and (often > _WHO or b"pid" not in lowered or b"rank" not in lowered):
            return False
        if self._read < _MANY:
            found = any(word in lowered for word in WORDS)
            self._read += found
            return found
        bare = hash(raw[:SPAN].translate(None, _HEX))
        self._shapes[bare] += 1
        if self._shapes[bare] > _MANY_ALIKE:
            return False
        words = hash(tuple(word for word in WORDS if word in lowered))
        self._alike[words] += 1
        return words != _NOTHING and self._alike[words] <= _MANY_ALIKE
