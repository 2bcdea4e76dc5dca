"""The parameters of classes that get their `__init__` from annotated fields: dataclasses and pydantic models."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from fairlead.modules.signature import Parameter, Signature, qualified, text_of
from fairlead.modules.symbols import ClassSymbol, Resolver

__all__ = ["dataclass_fields", "pydantic_fields"]


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
    """
    fields: dict[str, Parameter | None] = {}  # None: no parameter (init=False)
    for cls in reversed(mro):
        if not any(qualified(resolver, cls, d) == "dataclasses.dataclass" for d in cls.node.decorator_list):
            continue
        for name, node, kind in _annotated(resolver, cls):
            if kind == "dataclasses.KW_ONLY":
                continue
            if any(b.conditional for b in cls.own[name]):
                return Signature(open_reason=f"{cls.node.name} decides at run time which fields it has")
            default, has_default = node.value, node.value is not None
            if isinstance(default, ast.Call) and qualified(resolver, cls, default) == "dataclasses.field":
                given = {keyword.arg: keyword.value for keyword in default.keywords}
                if None in given:
                    return Signature(open_reason=f"the field {name} of {cls.node.name} is computed")
                init = given.get("init")
                if init is not None and not isinstance(init, ast.Constant):
                    return Signature(open_reason=f"the field {name} of {cls.node.name} is computed")
                if isinstance(init, ast.Constant) and not init.value:
                    fields[name] = None
                    continue
                default = given.get("default", given.get("default_factory"))
                has_default = default is not None
            annotation = node.annotation
            if kind == "dataclasses.InitVar" and isinstance(annotation, ast.Subscript):
                annotation = annotation.slice
            fields[name] = Parameter(name, not has_default, text_of(annotation), text_of(default))
    return Signature(tuple(p for p in fields.values() if p is not None))


def pydantic_fields(resolver: Resolver, mro: Sequence[ClassSymbol]) -> Signature:
    """The fields of a pydantic model.

    Open where aliases or validators may change the input, and where the model says what to do with
    unknown fields (`extra="allow"` or `"ignore"`).  pydantic's default drops them in silence; here
    that is the misspelling that a check is for.
    """
    fields: dict[str, Parameter] = {}
    for cls in reversed(mro):
        name = cls.node.name
        if "Config" in cls.own:
            return Signature(open_reason=f"{name} has a Config class")
        for binding in cls.own.get("model_config", ()):
            call = getattr(binding.node, "value", None)
            if not _only_forbids(call):
                return Signature(open_reason=f"{name} has a model_config of its own")
        for statements in cls.own.values():
            for binding in statements:
                for decorator in getattr(binding.node, "decorator_list", ()):
                    if qualified(resolver, cls, decorator) in ("pydantic.model_validator", "pydantic.root_validator"):
                        return Signature(open_reason=f"a validator of {name} may change what it takes")
        for field, node, _ in _annotated(resolver, cls):
            if field.startswith("_") or field == "model_config":
                continue
            parameter = _pydantic_field(resolver, cls, field, node)
            if parameter is None:
                return Signature(open_reason=f"the field {field} of {name} has an alias or is computed")
            fields[field] = parameter
        for field in fields.keys() & cls.own.keys():
            last = cls.own[field][-1].node
            if isinstance(last, ast.Assign):  # a default without annotation is an error of pydantic: leave it to it
                return Signature(open_reason=f"the field {field} of {name} is computed")
    return Signature(tuple(fields.values()), checked_types=False)


def _only_forbids(config: object) -> bool:
    """Whether a model_config only sets what does not change which names are accepted."""
    if not isinstance(config, ast.Call) or config.args:
        return False
    harmless = ("frozen", "strict", "arbitrary_types_allowed", "validate_assignment", "protected_namespaces", "title")
    return all(
        k.arg in harmless or (k.arg == "extra" and isinstance(k.value, ast.Constant) and k.value.value == "forbid")
        for k in config.keywords
    )


def _pydantic_field(resolver: Resolver, cls: ClassSymbol, name: str, node: ast.AnnAssign) -> Parameter | None:
    annotation = text_of(node.annotation) or ""
    default = node.value
    # Annotated[int, Field(default=3)] and an annotation that a validator is attached to.
    if "Annotated" in annotation and "Field" in annotation:
        return None
    required = default is None
    if isinstance(default, ast.Call):
        if qualified(resolver, cls, default) not in ("pydantic.Field", "pydantic.fields.Field"):
            return (
                None if qualified(resolver, cls, default).startswith("pydantic") else _field(name, annotation, default)
            )
        given = {keyword.arg for keyword in default.keywords}
        if None in given or given & {"alias", "validation_alias", "init"}:
            return None
        first = default.args[0] if default.args else None
        dots = isinstance(first, ast.Constant) and first.value is ...
        required = dots or (first is None and not given & {"default", "default_factory"})
    elif isinstance(default, ast.Constant) and default.value is ...:
        required = True
    return Parameter(name, required, annotation, text_of(default))


def _field(name: str, annotation: str, default: ast.expr) -> Parameter:
    return Parameter(name, False, annotation, text_of(default))
