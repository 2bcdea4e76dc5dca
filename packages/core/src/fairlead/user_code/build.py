"""Imports user code and builds objects from `{class:, args:}`, at run time."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from fairlead.errors import ConfigError, FairleadError, UserCodeError, did_you_mean
from fairlead.user_code.check import MAX_NESTING, is_spec
from fairlead.user_code.lookup import Problem, find_callable, split_spec
from fairlead.user_code.roots import CodeRoot, activate

__all__ = ["import_callable", "instantiate"]

_OURS = str(Path(__file__).parents[1]) + os.sep
_IMPORTLIB = os.path.dirname(importlib.__file__) + os.sep


def import_callable(spec: str, root: CodeRoot, *, where: str | None = None) -> object:
    """Imports what `module:object` names, with `root` first on `sys.path`.

    Args:
        spec: `module:object` or `module.object`.
        root: Where code is found.
        where: The config path, for the error.

    Raises:
        UserCodeError: There is no such module or object, or importing it raised; then `why` shows
            the user's own frames and the exception is the `__cause__`.
    """
    activate(root)
    try:
        module, name = split_spec(spec)
    except ValueError as error:
        raise UserCodeError(f"{spec[:80]!r} names no class", where=where, fix=str(error)) from None
    if name is None:
        module, name = _split_by_import(module, root, where)
    value: object = _import(module, root, where)
    done = module
    for part in name.split("."):
        value = _attribute(value, part, done, root, where)
        done = f"{done}.{part}"
    return value


def _split_by_import(dotted: str, root: CodeRoot, where: str | None) -> tuple[str, str]:
    """`pkg.mod.Class`: the longest part that imports as a module."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 1, -1):
        name = ".".join(parts[:end])
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                _fail(f"importing {name} failed", error, root, where)
        except (Exception, SystemExit) as error:
            _fail(f"importing {name} failed", error, root, where)
        else:
            return name, ".".join(parts[end:])
    return parts[0], ".".join(parts[1:])


def _import(module: str, root: CodeRoot, where: str | None) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            found = find_callable(f"{module}:_", root)
            if isinstance(found, Problem) and found.kind == "module-not-found":
                raise UserCodeError(found.what, where=where, why=found.why, fix=found.fix) from error
            why = "looked in:\n" + root.describe()
            raise UserCodeError(f"there is no module {error.name!r}", where=where, why=why) from error
        _fail(f"importing {module} failed", error, root, where)
    except FairleadError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard exits
        _fail(f"importing {module} failed", error, root, where)


def _attribute(owner: object, name: str, done: str, root: CodeRoot, where: str | None) -> object:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        if isinstance(owner, ModuleType) and hasattr(owner, "__path__"):
            try:  # a submodule that its package does not import itself
                return importlib.import_module(f"{owner.__name__}.{name}")
            except ModuleNotFoundError as missing:
                if missing.name != f"{owner.__name__}.{name}":
                    _fail(f"importing {owner.__name__}.{name} failed", missing, root, where)
            except (Exception, SystemExit) as failure:
                _fail(f"importing {owner.__name__}.{name} failed", failure, root, where)
        near = did_you_mean(name, dir(owner))
        fix = f"did you mean {near!r}?" if near else None
        raise UserCodeError(f"{done} has no {name!r}", where=where, why=str(error), fix=fix) from error
    except (Exception, SystemExit) as error:  # a module's own __getattr__, a descriptor
        _fail(f"looking up {name} in {done} failed", error, root, where)


def instantiate(node: Mapping[str, object], root: CodeRoot, *, path: tuple[str | int, ...] = ()) -> object:
    """Builds the object that a `{class:, args:}` node describes, nested nodes first.

    Args:
        node: The node; it is not changed, lists and mappings in it are handed on as copies.
        root: Where code is found.
        path: Where the node is in the config (`("model",)`), for errors.

    Raises:
        UserCodeError: Import or constructor raised; `where` is the config path.
        ConfigError: The node is not `{class:, args:}`, or is nested too deep.

    Example:
        >>> instantiate({"class": "fractions:Fraction", "args": {"numerator": 3}}, root)  # doctest: +SKIP
        Fraction(3, 1)
    """
    return _instantiate(node, root, path, 0)


def _instantiate(node: Mapping[str, object], root: CodeRoot, path: tuple[str | int, ...], depth: int) -> object:
    where = ".".join(map(str, path)) or None
    cls, args = node.get("class"), node.get("args")
    args = {} if args is None else args
    other = [key for key in node if key not in ("class", "args")]
    if not isinstance(cls, str) or not isinstance(args, Mapping) or other:
        raise ConfigError("this is not {class: module:object, args: {...}}", where=where)
    if wrong := [name for name in args if not isinstance(name, str)]:
        raise ConfigError(f"the argument name {wrong[0]!r} is not text", where=where)
    target = import_callable(cls, root, where=where)
    if not callable(target):
        raise UserCodeError(f"{cls} is not callable", where=where, why=f"it is a {type(target).__name__}")
    kwargs = {name: _value(value, root, (*path, "args", name), depth + 1) for name, value in args.items()}
    try:
        return target(**kwargs)
    except FairleadError:
        raise
    except (Exception, SystemExit) as error:
        _fail(f"building {cls} failed", error, root, where)


def _value(value: object, root: CodeRoot, path: tuple[str | int, ...], depth: int) -> object:
    if depth > MAX_NESTING:
        raise ConfigError(f"nested more than {MAX_NESTING} levels deep", where=".".join(map(str, path[:6])) + "...")
    if isinstance(value, Mapping):
        if is_spec(value):
            return _instantiate(value, root, path, depth)
        return {key: _value(child, root, (*path, key), depth + 1) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_value(child, root, (*path, index), depth + 1) for index, child in enumerate(value)]
    return value


def _fail(what: str, error: BaseException, root: CodeRoot, where: str | None) -> NoReturn:
    # The exception's own text may span lines or even raise: format_exception_only copes with both.
    text = traceback.format_exception_only(error)
    raise UserCodeError(what, where=where, why="".join([*_frames(error, root), *text]).rstrip()) from error


def _frames(error: BaseException, root: CodeRoot) -> list[str]:
    """The user's own frames; where there are none, those of the library that raised."""
    stack = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", _OURS, _IMPORTLIB))
    ]
    folders = tuple(f"{folder}{os.sep}" for folder in root.folders)
    users = [f for f in stack if f.filename.startswith(folders) and "site-packages" not in f.filename]
    return traceback.format_list(users or stack)
