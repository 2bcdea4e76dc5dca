"""The parameters of a dataclass, which gets its `__init__` from annotated fields."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature

from fairlead.user_code.signature import parameter, qualified
from fairlead.user_code.source import NotKnownError
from fairlead.user_code.symbols import ClassSymbol, Resolver

__all__ = ["dataclass_fields"]


def _annotated(resolver: Resolver, cls: ClassSymbol) -> Iterator[tuple[str, ast.AnnAssign, str]]:
    """Field name, statement and the full name of the annotation's outermost part; ClassVar left out."""
    for binding_list in cls.own.values():
        for binding in binding_list:
            node = binding.node
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                annotation = node.annotation
                if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
                    try:
                        annotation = ast.parse(annotation.value, mode="eval").body
                    except (SyntaxError, ValueError, RecursionError, MemoryError):
                        annotation = node.annotation
                kind = qualified(resolver, cls, annotation)
                if kind != "typing.ClassVar":
                    yield node.target.id, node, kind


def dataclass_fields(resolver: Resolver, mro: Sequence[ClassSymbol]) -> Signature:
    """The generated `__init__` of the first class of an MRO; fields of bases come first.

    Source: `dataclasses._process_class`: only bases that are dataclasses themselves contribute.

    Raises:
        NotKnownError: A field is decided at run time.
    """
    fields: dict[str, Parameter | None] = {}  # None: no parameter (init=False)
    for cls in reversed(mro):
        if not any(qualified(resolver, cls, d) == "dataclasses.dataclass" for d in cls.node.decorator_list):
            continue
        for name, node, kind in _annotated(resolver, cls):
            if kind == "dataclasses.KW_ONLY":
                continue
            if any(b.conditional for b in cls.own[name]):
                raise NotKnownError(f"{cls.node.name} decides at run time which fields it has")
            default = node.value
            if isinstance(default, ast.Call) and qualified(resolver, cls, default) == "dataclasses.field":
                given = {keyword.arg: keyword.value for keyword in default.keywords}
                if None in given:
                    raise NotKnownError(f"the field {name} of {cls.node.name} is computed")
                init = given.get("init")
                if init is not None and not isinstance(init, ast.Constant):
                    raise NotKnownError(f"the field {name} of {cls.node.name} is computed")
                if isinstance(init, ast.Constant) and not init.value:
                    fields[name] = None
                    continue
                default = given.get("default", given.get("default_factory"))
            annotation = node.annotation
            if kind == "dataclasses.InitVar" and isinstance(annotation, ast.Subscript):
                annotation = annotation.slice
            fields[name] = parameter(name, annotation, default)
    return Signature([field for field in fields.values() if field is not None])
