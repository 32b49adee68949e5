"""Long sequences of a Hugging Face causal language model, by DeepSpeed's ALST: `--sequence-parallel`, `--tiled-loss`.

Neighbouring ranks share each sequence (Ulysses): a rank has its part of the tokens, and in attention its part of the
heads for all tokens. The tiled loss makes the logits of some tokens at a time, and again in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .protocol import Batch, Workload, WorkloadError

IGNORED = -100  # the label of a token without a target, as in transformers
_HEADS = ("num_attention_heads", "num_key_value_heads")
_TILE_BYTES = 1 << 30  # of a tile's logits in fp32, as ArcticTraining chooses it
# What a config may do to logits between the head and the loss, or add to the loss.
_CHANGE_LOSS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_router_logits")


def share_sequences(workload: Workload, sharers: int, *, config: Any, place: str) -> Workload:
    """Return the workload of which so many neighbouring ranks share each sequence.

    `config` is the model's. Raises WorkloadError, which names `place`, where its heads cannot be shared.
    """
    heads, pairs = _count_heads(_read_heads(config))
    if not _can_share(heads, pairs, sharers):
        problem = (
            f"{sharers} ranks cannot share {heads} heads of attention and {pairs} of keys (sequence_parallel_size)"
        )
        raise WorkloadError(problem, place=place, hint="give a number of ranks that divides both")

    def build_batch(micro_batch_size: int) -> Batch:
        import torch

        batch = workload.build_batch(micro_batch_size)
        return take_part(batch, torch.distributed.get_rank() % sharers, sharers, place=place)

    return replace(
        workload,
        build_batch=build_batch,
        loss=_compute_shared_loss,
        join_ranks=functools.partial(_join_ranks, sharers=sharers),
        share_sequences=None,
    )


def find_most_sharers(config: Mapping[str, Any], ranks: int) -> int:
    """Return the most of so many ranks that can share a sequence, by the keys of a model's config; 1 where none can."""
    heads, pairs = _count_heads(config)
    return max(size for size in range(1, ranks + 1) if ranks % size == 0 and _can_share(heads, pairs, size))


def _read_heads(config: Any) -> dict[str, Any]:
    return {name: getattr(config.get_text_config(), name, None) for name in _HEADS}


def _count_heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the heads of attention and those of its keys; 1 where the config does not say so."""
    heads, pairs = (config.get(name) for name in _HEADS)
    return heads or 1, pairs or heads or 1


def _can_share(heads: int, pairs: int, sharers: int) -> bool:
    return heads % sharers == 0 and (pairs % sharers == 0 or sharers % pairs == 0)


def take_part(batch: Any, index: int, sharers: int, *, place: str) -> Batch:
    """Return one of the equal parts of a batch's sequences, with positions, and labels for the next token.

    Raises WorkloadError, which names `place`, for sequences that have no equal parts.
    """
    import torch

    tokens, labels = batch["input_ids"], batch["labels"]
    length = tokens.shape[1]
    if length % sharers:
        hint = f"give --seq-len {max(1, length // sharers) * sharers}, say"
        raise WorkloadError(f"{sharers} ranks cannot share sequences of {length} tokens", place=place, hint=hint)
    following = shift_labels_by_one(labels)
    whole = {
        "input_ids": tokens,
        "position_ids": torch.arange(length).expand_as(tokens),
        "labels": following,  # with labels the model computes a loss, of the next ones
        "shift_labels": following,
    }
    size = length // sharers
    return {name: values[:, index * size : (index + 1) * size].contiguous() for name, values in whole.items()}


def shift_labels_by_one(labels: Any) -> Any:
    """Return the label of the token after each: the last has none."""
    import torch

    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def _join_ranks(model: Any, *, sharers: int) -> Any:
    """Let the model's attention work on the heads of whole sequences; return DeepSpeed's `mpu`, the groups of ranks.

    DeepSpeed's `register_with_transformers` does the same for one micro batch size.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as groups
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    text = model.config.get_text_config()
    (heads, pairs), name = _count_heads(_read_heads(model.config)), text._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise WorkloadError(f"Ulysses needs another attention than {name!r}, which makes a mask of all pairs of tokens")
    attend = ALL_ATTENTION_FUNCTIONS[name]
    groups.initialize_sequence_parallel(sharers)

    @functools.cache
    def make_ulysses(rows: int) -> Any:
        return UlyssesSPAttentionHF(
            attn=attend,
            batch_size=rows,
            attn_head_count=heads,
            attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
            kv_head_count=pairs,
            num_hidden_layers=text.num_hidden_layers,
            process_group=groups.get_sequence_parallel_group(),
            seq_length_is_variable=True,
        )

    def attend_together(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        return make_ulysses(len(query))(module, query, key, value, None, *args, **kwargs)  # the mask is of a part

    ALL_ATTENTION_FUNCTIONS[name] = attend_together
    return groups


def _compute_shared_loss(engine: Any, batch: Any) -> Any:
    """Return the mean loss of a whole sequence's tokens; the gradient reaches this rank's part."""
    import torch
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import get_sequence_parallel_group
    from torch.distributed.nn.functional import all_gather

    group, loss = get_sequence_parallel_group(), engine(**batch).loss
    count = (batch["shift_labels"] != IGNORED).sum().to(loss.dtype)
    counts = [torch.empty_like(count) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(counts, count, group=group)
    losses = all_gather(loss, group=group)  # type: ignore[no-untyped-call]
    return sum(each * number for each, number in zip(losses, counts, strict=True)) / sum(counts)


def tile_loss(model: Any, *, place: str) -> Any:
    """Return the model, whose forward computes its loss tile by tile, and no logits.

    Raises WorkloadError, which names `place`, for a model whose loss is another one.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    changes = [name for name in _CHANGE_LOSS if getattr(model.config.get_text_config(), name, None)]
    if changes or model.loss_function is not ForCausalLMLoss:
        reason = f"its config has {changes[0]}" if changes else "it has a loss of its own"
        raise WorkloadError(f"--tiled-loss: {reason}, which tiles leave out", place=place, hint="drop the option")
    model.forward = functools.partial(_compute_tiled_loss, model)
    return model


def _compute_tiled_loss(model: Any, input_ids: Any, labels: Any = None, shift_labels: Any = None, **inputs: Any) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute
    from transformers.modeling_outputs import CausalLMOutput

    head: Callable[[Any], Any] = model.get_output_embeddings()
    hidden = model.base_model(input_ids=input_ids, **inputs).last_hidden_state
    following = shift_labels_by_one(labels) if shift_labels is None else shift_labels
    rows, length = following.shape
    vocabulary = model.config.get_text_config().vocab_size

    def add_up(hidden: Any, following: Any) -> Any:
        import torch

        logits = head(hidden).float().view(-1, vocabulary)
        return torch.nn.functional.cross_entropy(logits, following.reshape(-1), ignore_index=IGNORED, reduction="sum")

    total = sequence_tiled_compute(
        add_up,
        seqlen=length,
        shards=min(length, -(-4 * rows * length * vocabulary // _TILE_BYTES)),
        kwargs_to_shard={"hidden": hidden, "following": following},
        kwargs_to_pass={},
        grad_requiring_tensor_key="hidden",
        compute_params=list(head.parameters()),  # type: ignore[attr-defined]
        output_unshard_dimension=0,
        output_reduction="sum",
    )
    return CausalLMOutput(loss=total / (following != IGNORED).sum())
