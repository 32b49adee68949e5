"""Rules about sizes that have to go together: those of a batch, and those of groups of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from .deepspeed import BATCH_KEYS, SEQUENCE_RANKS, TENSOR_RANKS, count_sharers, read_ranks
from .problems import ZERO, Problem, Question, error, is_count, is_number, note, shorten, warning


def keeps_batch_identity(total: int, micro: int | None, accumulation: int | None, ranks: int) -> bool:
    """Whether train batch = micro batch × accumulation × ranks holds, or can where one of the two is left open."""
    each = (micro or 1) * (accumulation or 1) * ranks
    return total == each if micro and accumulation else total % each == 0


def complete_batch(config: Mapping[str, Any], ranks: int) -> tuple[int, int] | None:
    """Return (micro batch, accumulation) of a step on so many ranks, as DeepSpeed completes the sizes of a config.

    None where no size is given, where one is no number, such as "auto", and where they do not go together.
    """
    ranks //= count_sharers(config, SEQUENCE_RANKS)
    given = [config.get(key) for key in BATCH_KEYS]
    total, micro, accumulation = given
    if not all(size is None or is_count(size) for size in given) or not (total or micro) or not ranks:
        return None
    if total is not None:
        if not keeps_batch_identity(total, micro, accumulation, ranks):
            return None
        accumulation = accumulation or (total // (micro * ranks) if micro else 1)
        micro = micro or total // (accumulation * ranks)
    assert micro is not None
    return micro, accumulation or 1


def find_wrong_batch(question: Question) -> Iterator[Problem]:
    """The identity of sizes: train batch = micro batch × accumulation × ranks; those that share a sequence are one."""
    key, sharers = BATCH_KEYS[0], count_sharers(question.config, SEQUENCE_RANKS)
    ranks = None if question.ranks is None else question.ranks // sharers  # AutoTP's count each
    total, micro, accumulation = (size if is_count(size) else None for size in map(question.config.get, BATCH_KEYS))
    if total is None or ranks == 0:
        return
    each = (micro or 1) * (accumulation or 1)
    fitting_ranks, rest = divmod(total, each)
    is_whole = bool(micro and accumulation and not rest)
    if ranks is None:
        if rest:
            problem = f"{total} is no multiple of micro batch × accumulation = {each}, so no number of GPUs gives it"
            yield error(key, problem)
        elif is_whole:
            gpus = f"{fitting_ranks} GPUs" if sharers == 1 else f"{fitting_ranks * sharers} GPUs / {sharers}"
            problem = f"{total} = {micro} × {accumulation} × {gpus}; another number of GPUs is refused"
            yield note(key, problem)
    elif not keeps_batch_identity(total, micro, accumulation, ranks):
        factors = {f"micro batch {micro}": micro, f"accumulation {accumulation}": accumulation, f"{ranks} ranks": ranks}
        product = " × ".join(text for text, factor in factors.items() if factor)
        product += f" ({question.ranks} / {SEQUENCE_RANKS} {sharers})" if sharers > 1 else ""
        fitting_ranks *= sharers
        meant = f"those sizes are for {fitting_ranks} rank{'s' if fitting_ranks > 1 else ''}; " if is_whole else ""
        advice = _advise_batch(total, micro, accumulation, ranks)
        relation = "≠" if micro and accumulation else "is no multiple of"
        yield error(key, f"{key} {total} {relation} {product}", f"{meant}{advice}")


def _advise_batch(total: int, micro: int | None, accumulation: int | None, ranks: int) -> str:
    """The numbers with which sizes go together that do not."""
    key, each = BATCH_KEYS[0], (micro or 1) * (accumulation or 1) * ranks
    if micro and accumulation:
        return f"write {key} {each}, or leave it out: it is the product of the others"
    size, name = (micro, "micro batch") if micro else (accumulation, "accumulation")
    if size and total % ranks == 0:
        return f"{name} {gcd(size, total // ranks)} goes, or {key} a multiple of {each}"
    below = total // each * each
    near = " or ".join(str(number) for number in (below, below + each) if number)
    return f"write {key} {near}"


def find_uneven_groups(question: Question) -> Iterator[Problem]:
    """Sizes of groups of ranks that make no whole groups."""
    size = question.config.get(SEQUENCE_RANKS)
    if SEQUENCE_RANKS in question.config and not (is_number(size) and size >= 1 and size == int(size)):
        judge = warning if size is True else error
        yield judge(SEQUENCE_RANKS, f'"{SEQUENCE_RANKS}" is {shorten(size)}; it must be a whole number above 0')
    ranks, replicas = question.ranks, question.config.get("data_parallel_size")
    for keys in ((SEQUENCE_RANKS,), (TENSOR_RANKS,), (SEQUENCE_RANKS, TENSOR_RANKS)):  # also of both together
        each = count_sharers(question.config, *keys)
        if ranks is not None and ranks % each:
            yield error(keys[-1], f"{ranks} ranks make no groups of {each}", f"give a multiple of {each} GPUs")
            break
    shard = read_ranks(question.zero.get("zero_hpz_partition_size"))
    if ranks is not None and question.stage == 3 and ranks % min(shard, ranks):
        key, hint = f"{ZERO}.zero_hpz_partition_size", "give the GPUs of a node, or another divisor of all GPUs"
        yield error(key, f"{ranks} ranks make no groups of {shard}", hint)
    each = count_sharers(question.config, SEQUENCE_RANKS)
    if ranks is not None and SEQUENCE_RANKS in question.config and is_count(replicas) and replicas * each != ranks:
        problem = f"{replicas} × {SEQUENCE_RANKS} {each} = {replicas * each} ranks, and there are {ranks}"
        yield error("data_parallel_size", problem, f"write {ranks // each}, or leave it out")


def find_notes_on_groups(question: Question) -> Iterator[Problem]:
    """What DeepSpeed counts in a batch although several ranks train on it, and a size that it does not read."""
    if "data_parallel_size" in question.config and SEQUENCE_RANKS not in question.config:
        yield note("data_parallel_size", f"DeepSpeed reads it beside {SEQUENCE_RANKS} only")
    if (each := count_sharers(question.config, TENSOR_RANKS)) > 1 and BATCH_KEYS[0] in question.config:
        problem = f"{BATCH_KEYS[0]} counts every rank, and {each} each train on the same samples"
        yield note(TENSOR_RANKS, problem, f"a step has 1/{each} of it in samples that differ")
        if question.stage == 3 and all(is_count(question.config.get(key)) for key in BATCH_KEYS):
            problem = f"stage 3 counts {each} ranks of {TENSOR_RANKS} as one, the engine each: no total suits both"
            yield error(BATCH_KEYS[0], problem, "leave it out: DeepSpeed multiplies the other two")


def find_refused_groups(question: Question) -> Iterator[Problem]:
    """The same as DeepSpeed sees it: it divides the ranks by those of a sequence, and trains with any part of one."""
    size = question.config.get(SEQUENCE_RANKS)
    is_taken = is_number(size) and size > 0 and "data_parallel_size" not in question.config
    for problem in find_uneven_groups(question):
        yield replace(problem, severity="warning") if is_taken and problem.key == SEQUENCE_RANKS else problem
