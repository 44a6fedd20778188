"""Sequence parallelism for models of Hugging Face transformers (docs/transformers.md).

register() adds the attention "pipecomm_ulysses", for which every rank passes its piece of the sequence;
split_batch() cuts that piece from a whole batch, sum_gradients() sums the gradients of the pieces, and
generate() computes a prompt in pieces.
"""

from . import required as _required  # noqa: F401
from .attention import register
from .batch import split_batch
from .generation import generate
from .gradients import sum_gradients
from .model_check import watch_models

watch_models()

__all__ = ["generate", "register", "split_batch", "sum_gradients"]
