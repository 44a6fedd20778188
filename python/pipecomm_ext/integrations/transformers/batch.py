"""A rank's piece of a batch, with what a model would otherwise derive from its own tokens only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .model_check import note_piece
from .pieces import cut, ring_lengths, state_of

IGNORED = -100  # the label of a token that does not count, in transformers
# The sequence dim of each input of a model.
SEQUENCE_DIM = {
    "input_ids": 1,
    "inputs_embeds": 1,
    "token_type_ids": 1,
    "position_ids": -1,
    "labels": 1,
    "shift_labels": 1,
}


def split_batch(batch: Mapping[str, Any], process_group: Any = None) -> dict[str, Any]:
    """This rank's piece of a batch that every rank holds whole. Nothing is communicated.

    The sequence is cut by `cal_split_sizes`, or, over a ring group, in zigzag order. A causal language model
    that is called with the piece returns the logits of its tokens, and as `loss` this rank's share: the sum
    over the ranks is the loss of the whole batch, and the sum of their gradients is its gradient. Models with
    other losses return logits only: their forward refuses `labels` by name.

    Args:
        batch: what the model would be called with, [batch, tokens] each: `input_ids` or `inputs_embeds`
            ([batch, tokens, hidden]), and optionally `labels` (IGNORED, -100, does not count), or
            `shift_labels`, which are shifted already; `position_ids`; `token_type_ids`; `attention_mask`,
            also with four dims, [batch or 1, 1, tokens, tokens]. Values that are not tensors, or have no
            dims, are passed on: also `num_items_in_batch`, if several batches make one step.
        process_group: the group that was passed to `register`.

    Returns:
        a dict with pieces of all that has a token dim, and with

        * `attention_mask` of the whole sequence; ones if there was none. For packed sequences (no mask, and
          positions that restart within a row) one of four dims that separates them;
        * `position_ids` of these tokens, from 0 if there were none; models that count otherwise then refuse
          the piece;
        * `shift_labels`, shifted before the cut, also as `labels`, since models return no loss without them,
          and `num_items_in_batch`, the number of labels that count in the whole batch.

    Raises:
        ValueError: lengths that differ, fewer tokens than ranks, or a tensor whose layout is not known.

    Example:
        ```python
        tokens = torch.arange(14).view(2, 7)  # the whole batch, on every rank
        piece = split_batch({"input_ids": tokens, "labels": tokens})
        loss = model(**piece).loss  # this rank's share of the loss
        ```
    """
    state = state_of(process_group)
    whole = dict(batch)
    tokens = whole.get("input_ids", whole.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise ValueError("the batch must hold input_ids [batch, tokens] or inputs_embeds")
    length = tokens.size(1)
    num_ulysses, num_ring = state.get_ulysses_group_size(), state.get_ring_group_size()
    if min(ring_lengths(state, length)) < num_ulysses:
        raise ValueError(f"a sequence of {length} tokens cannot be split over {num_ulysses * num_ring} ranks")
    mask = whole.pop("attention_mask", None)
    _check_lengths(whole, mask, length)

    if mask is None:
        mask = _mask_of(tokens, whole.get("position_ids"))
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(length, device=tokens.device).expand(tokens.size(0), length)
    labels = whole.pop("labels", None)
    if labels is not None and whole.get("shift_labels") is None:
        whole["shift_labels"] = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    piece: dict[str, Any] = {
        name: cut(value, SEQUENCE_DIM[name], state) if name in SEQUENCE_DIM and value is not None else value
        for name, value in whole.items()
    }
    note_piece(length, piece["position_ids"].size(-1))
    if piece.get("shift_labels") is not None:
        piece["labels"] = piece["shift_labels"]
        piece.setdefault("num_items_in_batch", (whole["shift_labels"] != IGNORED).sum())
    return {**piece, "attention_mask": mask}


def _check_lengths(whole: dict[str, Any], mask: Any, length: int) -> None:
    for name, value in whole.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        if name not in SEQUENCE_DIM:
            raise ValueError(
                f"split_batch() does not know how {name}, {tuple(value.shape)}, is laid out; leave it out, "
                "and give the model its piece of it"
            )
        if value.dim() < 2 or value.size(SEQUENCE_DIM[name]) != length:
            raise ValueError(f"{name} is {tuple(value.shape)}, where there are {length} tokens")
    if mask is not None and tuple(mask.shape[1:]) not in ((length,), (1, length, length)):
        raise ValueError(
            f"attention_mask is {tuple(mask.shape)}, where there are {length} tokens; it must be [batch, "
            "tokens] or [batch, 1, tokens, tokens], of the whole sequence"
        )


def _mask_of(tokens: Tensor, position_ids: Tensor | None) -> Tensor:
    """Returns ones, or a mask that separates packed sequences."""
    if position_ids is not None and position_ids.dim() == 2:
        is_first = position_ids.diff(dim=1) != 1  # for all tokens but the first one
        if is_first.any():
            number = functional.pad(is_first.long().cumsum(1), (1, 0))
            return (number[:, None, :, None] == number[:, None, None, :]).tril()
    return tokens.new_ones(tokens.shape[:2], dtype=torch.bool)
