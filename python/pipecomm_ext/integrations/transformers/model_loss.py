"""Refuses losses of which a rank's share is not known: only those of next tokens are summed over the ranks.

split_batch() shifts the labels of the whole batch. Other models mean the labels of the tokens themselves,
and some compute a mean of their own. The function that a model finds as its `loss_function` is therefore
replaced for the time of a forward by one that sees its arguments, and whose result must be the model's loss.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

BY_HAND = (
    'pass the labels as "shift_labels", which are cut as they are, take "shift_labels" and "labels" out of '
    'the piece, and compute the loss of the logits: cross_entropy(..., reduction="sum") / num_items_in_batch'
)


class SeenLoss:
    """A loss function, and its results for the piece's labels."""

    def __init__(self, function: Callable[..., Any], is_whole: bool):
        self._function, self._is_whole = function, is_whole
        self._results: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._function(*args, **kwargs)
        is_share = self._is_whole or kwargs.get("num_items_in_batch") is not None
        if is_share and kwargs.get("shift_labels") is not None:
            self._results.append(result)
        return result

    def check(self, model: PreTrainedModel, output: Any) -> None:
        loss = output.get("loss") if isinstance(output, Mapping) else output[0]
        if isinstance(loss, Tensor) and not any(loss is result for result in self._results):
            raise ValueError(
                f"{type(model).__name__} computes a loss of its own, or adds to that of the tokens, so that "
                f"the share of a piece is not known: {BY_HAND}"
            )


@contextlib.contextmanager
def seen_loss(model: PreTrainedModel, is_whole: bool) -> Iterator[SeenLoss]:
    own = vars(model).get("_loss_function")
    model.loss_function = seen = SeenLoss(model.loss_function, is_whole)
    try:
        yield seen
    finally:
        if own is None:
            del model._loss_function
        else:
            model.loss_function = own


def check_labels(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    if given.get("labels") is None:
        return
    if given.get("shift_labels") is None:
        raise ValueError(
            f"{type(model).__name__} got the labels of a piece without shift_labels, and would shift them "
            f"within the piece: pass on both, as split_batch() made them, or {BY_HAND}"
        )
    if "shift_labels" not in inspect.signature(model.loss_function).parameters:
        raise ValueError(
            f"{type(model).__name__} cannot take the labels that split_batch() has shifted: its loss is not "
            f"that of next tokens (its loss_function has no parameter shift_labels); {BY_HAND}"
        )
