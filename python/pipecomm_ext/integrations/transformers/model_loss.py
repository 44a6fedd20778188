"""Refuses losses whose share of a rank is not known: only those of next tokens are summed over the ranks.

split_batch() shifts the labels of the whole batch. Other models expect the labels of the tokens themselves,
and some compute a mean of their own. During a forward, a function that sees the arguments therefore replaces
the model's `loss_function`, and its result must be the model's loss: that of the model itself, and of each
model that it calls with labels.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

BY_HAND = (
    'pass the labels as "shift_labels", which are cut as they are, take "shift_labels" and "labels" out of '
    'the piece, and compute the loss of the logits: cross_entropy(..., reduction="sum") / num_items_in_batch'
)


@contextlib.contextmanager
def seeing_shares(model: PreTrainedModel, is_whole: bool, shares: list[Any]) -> Iterator[None]:
    """Adds to `shares` what the model's loss function returns for the labels of a piece."""
    function, own = model.loss_function, vars(model).get("_loss_function")
    takes_them = _takes_shifted_labels(function)

    @functools.wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        is_share = is_whole or kwargs.get("num_items_in_batch") is not None
        if is_share and takes_them and kwargs.get("shift_labels") is not None:
            shares.append(result)
        return result

    model.loss_function = seen
    try:
        yield
    finally:
        if own is None:
            del model._loss_function
        else:
            model.loss_function = own


def check_loss(model: PreTrainedModel, output: Any, shares: list[Any]) -> None:
    loss = _loss_of(output)
    if isinstance(loss, Tensor) and not any(loss is share for share in shares):
        raise ValueError(
            f"{type(model).__name__} computes a loss of its own, or adds to that of the tokens, so that "
            f"the share of a piece is not known: {BY_HAND}"
        )


def _loss_of(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, (tuple, list)):
        return output[0]
    return output if isinstance(output, Tensor) else getattr(output, "loss", None)


def _takes_shifted_labels(function: Any) -> bool:
    """Whether it takes them. Others would use the shifted labels as those of the tokens themselves."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):
        return "shift_labels" in inspect.signature(function).parameters
    # Faster than a signature, and needed in each forward.
    return "shift_labels" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def check_labels(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    if given.get("labels") is None:
        return
    if given.get("shift_labels") is None:
        raise ValueError(
            f"{type(model).__name__} got the labels of a piece without shift_labels, and would shift them "
            f"within the piece: pass on both, as split_batch() made them, or {BY_HAND}"
        )
    if not _takes_shifted_labels(model.loss_function):
        raise ValueError(
            f"{type(model).__name__} cannot take the labels that split_batch() has shifted: its loss is not "
            f"that of next tokens (its loss_function has no parameter shift_labels); {BY_HAND}"
        )
