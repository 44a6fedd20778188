"""Public names as griffe must see them: what the package puts in place at run time, in static form.

* `from .all_to_all import all_to_all`: the function, not the module of that name.
* `Send = _C.Send`, `all_gather_single = all_gather_into_tensor`: the object behind the assignment.
* `get_vtp_size_list = _of_default(PipelineTopology.get_vtp_size_list)`: the method, without `self`.
* `@_with_arguments_of(StepArguments)`: the fields of that class as keywords.
* Functions with `@generator`: members of `schedules`.
* `__slots__` that is a dict, and `rank, peer: ...` under "Attributes:": attributes of the class.
"""

from __future__ import annotations

import ast
import copy
import re

import griffe

NO_BREAK_SPACE = "\u00a0"
SEVERAL_NAMES = re.compile(r"(?<=^    )\w+(?:, \w+)+(?=: )", re.MULTILINE)


class PublicNames(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        if pkg.name != "pipecomm_ext":
            return
        for module in list(_modules(pkg)):
            _imports_over_modules(module)
            for attribute in _members(module, griffe.Attribute):
                _assigned_object(pkg, module, attribute)
            for function in _members(module, griffe.Function):
                _arguments_of_a_class(pkg, function)
            for class_ in _members(module, griffe.Class):
                _attributes(class_)
        _schedules(pkg)


def _members(module: griffe.Module, kind: type) -> list:
    """What the module itself defines, without imports."""
    return [member for member in module.members.values() if isinstance(member, kind)]


def _modules(module: griffe.Module):
    yield module
    for member in _members(module, griffe.Module):
        yield from _modules(member)


def _imports_over_modules(module: griffe.Module) -> None:
    for name, target in module.imports.items():
        if target == f"{module.path}.{name}.{name}" or target.endswith(f".{name}.{name}"):
            module.set_member(name, griffe.Alias(name, target, parent=module))


def _assigned_object(pkg: griffe.Module, module: griffe.Module, attribute: griffe.Attribute) -> None:
    value, name = attribute.value, attribute.name
    if isinstance(value, griffe.ExprName | griffe.ExprAttribute):
        target = _lookup(pkg, value.canonical_path)
        if target is not None and (target.is_function or target.is_class):
            module.set_member(name, griffe.Alias(name, target, parent=module))
    elif isinstance(value, griffe.ExprCall) and str(value.function) == "_of_default":
        method = _lookup(pkg, value.arguments[0].canonical_path)
        function = copy.copy(method)
        function.name = name
        function.parameters = griffe.Parameters(*list(method.parameters)[1:])
        module.set_member(name, function)


def _arguments_of_a_class(pkg: griffe.Module, function: griffe.Function) -> None:
    for decorator in function.decorators:
        if decorator.callable_path.endswith("._with_arguments_of"):
            class_ = _lookup(pkg, decorator.value.arguments[0].canonical_path)
            function.parameters = griffe.Parameters(
                *(
                    griffe.Parameter(
                        field.name,
                        annotation=field.annotation,
                        default=field.value,
                        kind=griffe.ParameterKind.keyword_only,
                    )
                    for field in _members(class_, griffe.Attribute)
                    if field.annotation is not None and "init=False" not in str(field.value)
                )
            )


def _lookup(pkg: griffe.Module, path: str) -> griffe.Object | None:
    found = pkg
    for name in path.split(".")[1:]:
        if (found := found.members.get(name)) is None:
            return None
        if found.is_alias:
            return _lookup(pkg, ".".join([found.target_path, *path.split(".")[found.path.count(".") + 1 :]]))
    return found


def _attributes(class_: griffe.Class) -> None:
    """Attributes as sections of the docstring of their class."""
    slots = class_.members.get("__slots__")
    if slots is not None and str(slots.value).startswith("{"):
        texts = ast.literal_eval(str(slots.value))
        lines = [f"    {name}: {text}" for name, text in texts.items() if not name.startswith("_")]
        class_.docstring.value += "\n\nAttributes:\n" + "\n".join(lines)
    if class_.docstring is not None:  # griffe takes what follows a blank for the type
        class_.docstring.value = SEVERAL_NAMES.sub(
            lambda names: names[0].replace(" ", NO_BREAK_SPACE) + " ()", class_.docstring.value
        )


def _schedules(pkg: griffe.Module) -> None:
    schedules = pkg["schedules"]
    generators = schedules["generators"]
    for module in _modules(generators):
        for function in _members(module, griffe.Function):
            if any(str(decorator.value).startswith("generator(") for decorator in function.decorators):
                schedules.set_member(function.name, griffe.Alias(function.name, function, parent=schedules))
