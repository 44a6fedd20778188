"""The values that stages pass on: tensors and None in tuples, lists and dicts, as tensors and a structure.

A structure is JSON text: a tensor is 1, None is null, a dict an object, a tuple ["tuple", ...] and a list
["list", ...]. PLAIN, the empty text, is a tuple of tensors or a single one: the usual case, which costs
nothing. Classes of tuples and dicts do not travel, and nothing is ever unpickled.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from ..errors import PipeCommError

PLAIN = ""
_TENSOR = 1
_SEQUENCES = {"tuple": tuple, "list": list}
_NO_KEYWORDS: Mapping[str, Any] = {}


class Call(NamedTuple):
    """How a stage is called. `received` are the differentiable tensors that came over a border."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any] = _NO_KEYWORDS
    received: Sequence[torch.Tensor] = ()

    @classmethod
    def of(cls, value: Any, received: Sequence[torch.Tensor] = ()) -> Call:
        """A mapping becomes keywords, a tuple or a list positional arguments, anything else the only one."""
        if isinstance(value, torch.Tensor):
            return cls((value,), _NO_KEYWORDS, received)
        if isinstance(value, Mapping):
            return cls((), value, received)
        return cls(as_tuple(value), _NO_KEYWORDS, received)

    def run(self, stage: int, module: Callable[..., Any], keywords: Mapping[str, Any] = _NO_KEYWORDS) -> Any:
        """Calls the stage, with `keywords` in addition, and returns its result."""
        try:
            return module(*self.args, **self.kwargs, **keywords)
        except TypeError as error:
            problem = self._mismatch(module, keywords)
            if problem is None:
                raise
            names = ", ".join([*self.kwargs, *keywords]) or "none"
            raise TypeError(
                f"stage {stage} cannot be called with {len(self.args)} positional arguments and the keywords "
                f"{names}: {problem}; a tuple is passed as positional arguments and a dict as keywords, so "
                "give (value,) to pass one as it is"
            ) from error

    def _mismatch(self, module: Callable[..., Any], keywords: Mapping[str, Any]) -> str | None:
        """Why these arguments do not fit the parameters of the stage; None if they do, or if it has no
        signature."""
        try:
            signature = inspect.signature(module.forward if isinstance(module, nn.Module) else module)
        except (TypeError, ValueError):
            return None
        try:
            signature.bind(*self.args, **self.kwargs, **keywords)
        except TypeError as error:
            return str(error)
        return None


def as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def flattened(value: Any, what: str) -> tuple[tuple[torch.Tensor, ...], str]:
    """The tensors of a value, in order, and its structure.

    Raises:
        TypeError: something in it is neither a tensor nor None; `what` begins the message.
    """
    if isinstance(value, torch.Tensor):
        return (value,), PLAIN
    if isinstance(value, (tuple, list)) and all(isinstance(part, torch.Tensor) for part in value):
        return tuple(value), PLAIN
    tensors: list[torch.Tensor] = []
    template = _template_of(value, tensors, what, "it")
    return tuple(tensors), json.dumps(template)


def _template_of(value: Any, tensors: list[torch.Tensor], what: str, where: str) -> Any:
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _template_of(part, tensors, what, f"{where}[{key!r}]") for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_template_of(part, tensors, what, f"{where}[{i}]") for i, part in enumerate(value))]
    problem = (
        "has keys that are no strings" if isinstance(value, Mapping) else f"is of {type(value).__name__}"
    )
    raise TypeError(
        f"{what} must be tensors and None, alone or in tuples, lists and dicts with strings as keys, but "
        f"{where} {problem}; give other values to the stages that need them: step(..., kwargs=)"
    )


def rebuilt(tensors: Sequence[torch.Tensor], structure: str) -> Any:
    """The value whose tensors and structure these are; of a PLAIN one the tensors.

    Raises:
        PipeCommError: the structure is invalid, or belongs to another number of tensors.
    """
    if structure == PLAIN:
        return tensors
    return _filled(_template(structure, len(tensors)), iter(tensors))


@lru_cache(maxsize=512)
def _template(structure: str, num_tensors: int) -> Any:
    try:
        template = json.loads(structure)
        if _num_tensors(template) == num_tensors:
            return template
    except (ValueError, RecursionError):
        pass
    raise PipeCommError(
        f"a header with the structure {structure[:100]} of {num_tensors} tensors: the peer runs another "
        "version of pipecomm_ext"
    )


def _num_tensors(template: Any) -> int:
    if template is None:
        return 0
    if type(template) is int and template == _TENSOR:
        return 1
    if isinstance(template, dict):
        return sum(map(_num_tensors, template.values()))
    if isinstance(template, list) and template and template[0] in list(_SEQUENCES):
        return sum(map(_num_tensors, template[1:]))
    raise ValueError("a template must be that of a value")


def _filled(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if template is None:
        return None
    if isinstance(template, dict):
        return {key: _filled(part, tensors) for key, part in template.items()}
    if isinstance(template, list):
        return _SEQUENCES[template[0]](_filled(part, tensors) for part in template[1:])
    return next(tensors)


def signature(value: Any) -> object:
    """Everything about inputs that the shapes of a stage's outputs may depend on, as a key."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(map(signature, value))
    if isinstance(value, Mapping):
        return tuple((key, signature(part)) for key, part in value.items())
    return type(value)


def detached(value: Any) -> Any:
    """The value with its tensors detached, in tuples, lists and mappings of their own."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        parts = map(detached, value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        result = cast(MutableMapping[Any, Any], copy.copy(value))
        for key, part in value.items():
            result[key] = detached(part)
        return result
    return value
