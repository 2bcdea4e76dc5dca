"""Checks a `{class:, args:}` node, and those nested in its arguments, against the source of what it names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, Signature

from fairlead.errors import did_you_mean
from fairlead.user_code.lookup import CallableInfo, Problem, find_callable, split_spec
from fairlead.user_code.roots import CodeRoot
from fairlead.user_code.source import Sources

MAX_NESTING = 100  # as deep as a job file can be
# What certainly is no int, float, ...: an int is a float in Python, and bool is an int.
_WRONG: dict[str, tuple[type, ...]] = {
    "int": (str, float, list, dict),
    "float": (str, list, dict),
    "bool": (str, list, dict),
    "str": (bool, int, float, list, dict),
}


def is_spec(value: object) -> bool:
    """Whether a value in `args` is a nested `{class:, args:}`, and not a mapping of the user's own.

    It is one if it has no other keys, or if its class reads `module:object`: then another key is a misspelt `args`.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("class"), str):
        return False
    if set(value) <= {"class", "args"}:
        return True
    try:
        return split_spec(value["class"])[1] is not None
    except ValueError:
        return False


def check_spec(
    cls: str, args: Mapping[str, object], root: CodeRoot, *, sources: Sources | None = None
) -> list[Problem]:
    """The certain problems of a class and its arguments, nested ones too; "class-unchecked" says what is not known."""
    return list(_check(cls, args, Sources(root) if sources is None else sources, ()))


def _check(cls: str, args: Mapping[str, object], sources: Sources, path: tuple[str | int, ...]) -> Iterator[Problem]:
    found = find_callable(cls, sources.root, sources=sources)
    problems = [found] if isinstance(found, Problem) else list(_arguments(found, args))
    yield from (_at(problem, path) for problem in problems)
    for name, value in args.items():
        yield from _nested(value, sources, (*path, "args", _key(name)))


def _key(key: object) -> str | int:
    return key if isinstance(key, str | int) else str(key)


def _at(problem: Problem, path: tuple[str | int, ...]) -> Problem:
    return Problem(problem.code, (*path, *problem.path), problem.what, problem.why, problem.fix)


def _nested(value: object, sources: Sources, path: tuple[str | int, ...]) -> Iterator[Problem]:
    if len(path) > MAX_NESTING:
        yield Problem("class-unchecked", path, f"nested more than {MAX_NESTING} levels deep")
        return
    if is_spec(value):
        yield from _spec(value, sources, path)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _nested(child, sources, (*path, _key(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, child in enumerate(value):
            yield from _nested(child, sources, (*path, index))


def _spec(value: object, sources: Sources, path: tuple[str | int, ...]) -> Iterator[Problem]:
    assert isinstance(value, Mapping)
    for key in value:
        if key not in ("class", "args"):
            near = did_you_mean(str(key), ["args"])
            fix = "write 'args'" if near else "put the arguments under 'args'"
            yield Problem("argument-unknown", (*path, str(key)), f"{key!r} beside 'class'", "there is only args", fix)
    args = value.get("args")
    if args is not None and not isinstance(args, Mapping):
        yield Problem("wrong-type", (*path, "args"), "'args' is not a mapping", None, "write args: {name: value}")
        args = None
    yield from _check(value["class"], args or {}, sources, path)


def _arguments(found: CallableInfo, args: Mapping[str, object]) -> Iterator[Problem]:
    signature = found.signature
    if signature is None:
        why = f"{found.unknown}; its arguments are first checked when it is built"
        yield Problem("class-unchecked", ("class",), f"what {found.spec} takes cannot be known", why)
        return
    by_name = _by_name(signature)
    misspelt: set[str] = set()
    for name, value in args.items():
        if not isinstance(name, str):
            yield Problem("argument-unknown", ("args", str(name)), f"the argument name {name!r} is not text")
        elif name in by_name:
            yield from _type(found, by_name[name], value)
        else:
            near = did_you_mean(name, [n for n in by_name if n not in args])
            misspelt |= {near} if near else set()
            yield from _unknown(found, signature, name, near)
    for parameter in signature.parameters.values():
        if parameter.default is not Parameter.empty or parameter.kind is Parameter.VAR_KEYWORD:
            continue
        call = f"{found.name}(...)"
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            why = "it is positional-only, and a job file gives arguments by name"
            fix = "name a function that takes it by name"
            yield Problem("argument-missing", ("args", parameter.name), f"{call} needs {parameter.name!r}", why, fix)
        elif parameter.name not in args and parameter.name not in misspelt:
            what = f"{call} needs the argument {parameter.name!r}"
            annotation = "" if parameter.annotation is Parameter.empty else f" ({parameter.annotation})"
            fix = f"give {parameter.name}{annotation} in args"
            yield Problem("argument-missing", ("args", parameter.name), what, _source(found), fix)


def _by_name(signature: Signature) -> dict[str, Parameter]:
    """What can be given by name."""
    others = (Parameter.POSITIONAL_ONLY, Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in signature.parameters.items() if parameter.kind not in others}


def _unknown(found: CallableInfo, signature: Signature, name: str, near: str | None) -> Iterator[Problem]:
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        if near is not None:
            what = f"{found.name} takes any argument (**kwargs), so {name!r} may be right"
            yield Problem("class-unchecked", ("args", name), what, None, f"did you mean {near!r}?")
        return
    if name in signature.parameters:
        why = "it is positional-only, and a job file gives arguments by name"
        yield Problem("argument-unknown", ("args", name), f"{found.name} does not take {name!r} by name", why)
        return
    takes = ", ".join(_by_name(signature)) or "no arguments"
    fix = f"write {near!r}" if near else f"it takes: {takes}"
    yield Problem("argument-unknown", ("args", name), f"{found.name} takes no argument {name!r}", _source(found), fix)


def _source(found: CallableInfo) -> str | None:
    return f"read {found.file}:{found.line}" if found.file is not None else None


def _type(found: CallableInfo, parameter: Parameter, value: object) -> Iterator[Problem]:
    """Only what is certain: a builtin scalar annotation, taken literally, and a value of another kind."""
    if parameter.annotation is Parameter.empty:
        return
    wanted = parameter.annotation.strip("'\"").removesuffix(" | None")
    if not isinstance(value, _WRONG.get(wanted, ())) or is_spec(value):
        return
    default = "" if parameter.default is Parameter.empty else parameter.default
    if isinstance(value, str) and default[:1] in ("'", '"'):
        return  # `devices: int = "auto"`: the annotation is not meant literally
    if isinstance(value, float) and "." in default:
        return  # `momentum: int = 0.9`
    what = f"{found.name} takes {parameter.name}: {wanted}, not {value!r:.60}"
    fix = f'write {parameter.name}: "{value}"' if wanted == "str" and not isinstance(value, list | dict) else None
    if wanted == "bool" and isinstance(value, str):
        fix = "write true or false"
    yield Problem("wrong-type", ("args", parameter.name), what, _source(found), fix)
