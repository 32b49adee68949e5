"""Who asks which rules about a DeepSpeed config.

`fit`, `plan`, `run` and `probe` refuse a base config by the first error of `SEARCH_RULES`; `explain` shows every
problem of `EXPLAIN_RULES`.
"""

from __future__ import annotations

from .batch_rules import find_notes_on_groups, find_refused_groups, find_uneven_groups, find_wrong_batch
from .effect_rules import (
    find_auto,
    find_contradictions,
    find_harmful,
    find_ignored,
    find_release_faults,
    find_sizes_that_hurt,
    find_two_precisions,
    find_unchosen,
)
from .key_rules import (
    find_complaints,
    find_decided_by_trials,
    find_deprecated,
    find_ill_typed,
    find_references,
    find_refused_arguments,
    find_removed,
    find_unknown,
)
from .problems import Rule

SEARCH_RULES: tuple[Rule, ...] = (
    find_references,
    find_ill_typed,
    find_refused_arguments,
    find_decided_by_trials,
    find_removed,
    find_two_precisions,
    find_uneven_groups,
    find_wrong_batch,
)
EXPLAIN_RULES: tuple[Rule, ...] = (
    find_references,
    find_release_faults,
    find_unchosen,
    find_complaints,
    find_ill_typed,
    find_refused_arguments,
    find_unknown,
    find_two_precisions,
    find_refused_groups,
    find_wrong_batch,
    find_notes_on_groups,
    find_contradictions,
    find_ignored,
    find_deprecated,
    find_sizes_that_hurt,
    find_harmful,
    find_auto,
)
