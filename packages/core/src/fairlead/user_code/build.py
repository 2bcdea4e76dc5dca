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

_OURS = str(Path(__file__).parents[1]) + os.sep
_IMPORTLIB = os.path.dirname(importlib.__file__) + os.sep


def import_callable(spec: str, root: CodeRoot, *, where: str | None = None) -> object:
    """Imports what `module:object` or `module.object` names, with the folders of `root` first on `sys.path`.

    `UserCodeError` where there is none; where importing it raised, `why` shows the user's own frames.
    """
    activate(root)
    try:
        module, name = split_spec(spec)
    except ValueError as error:
        raise UserCodeError(f"{spec[:80]!r} names no class", where=where, fix=str(error)) from None
    if name is None:  # `pkg.mod.Class`: the longest part that is a module
        parts = module.split(".")
        splits = [(".".join(parts[:end]), ".".join(parts[end:])) for end in range(len(parts) - 1, 0, -1)]
    else:
        splits = [(module, name)]
    for split in splits:
        module, name = split
        value: object = _import(module, root, where)
        if value is not None:
            break
    else:
        found = find_callable(spec, root)
        if not isinstance(found, Problem):
            raise UserCodeError(f"there is no module {module!r}", where=where)
        raise UserCodeError(found.what, where=where, why=found.why, fix=found.fix)
    for part in name.split("."):
        value = _attribute(value, part, module, root, where)
        module = f"{module}.{part}"
    return value


def _import(module: str, root: CodeRoot, where: str | None) -> ModuleType | None:
    """The module; None if there is none."""
    try:
        return importlib.import_module(module)
    except FairleadError:
        raise
    except (Exception, SystemExit) as error:  # a script without a main guard exits
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            return None
        _fail(f"importing {module} failed", error, root, where)


def _attribute(owner: object, name: str, done: str, root: CodeRoot, where: str | None) -> object:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        if isinstance(owner, ModuleType) and hasattr(owner, "__path__"):
            submodule = _import(f"{owner.__name__}.{name}", root, where)  # its package may not import it itself
            if submodule is not None:
                return submodule
        near = did_you_mean(name, dir(owner))
        fix = f"did you mean {near!r}?" if near else None
        raise UserCodeError(f"{done} has no {name!r}", where=where, why=str(error), fix=fix) from error
    except (Exception, SystemExit) as error:  # a module's own __getattr__, a descriptor
        _fail(f"looking up {name} in {done} failed", error, root, where)


def instantiate(node: Mapping[str, object], root: CodeRoot, *, path: tuple[str | int, ...] = ()) -> object:
    """Builds the object that a `{class:, args:}` node at a path of the config describes, nested nodes first.

    The node is not changed: lists and mappings in it are handed on as copies. `ConfigError` where it is no such node,
    `UserCodeError` where the import or the constructor raised.
    """
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
    kwargs = {name: _value(value, root, (*path, "args", name)) for name, value in args.items()}
    try:
        return target(**kwargs)
    except FairleadError:
        raise
    except (Exception, SystemExit) as error:
        _fail(f"building {cls} failed", error, root, where)


def _value(value: object, root: CodeRoot, path: tuple[str | int, ...]) -> object:
    if len(path) > MAX_NESTING:
        raise ConfigError(f"nested more than {MAX_NESTING} levels deep", where=".".join(map(str, path[:6])) + "...")
    if isinstance(value, Mapping):
        if is_spec(value):
            return instantiate(value, root, path=path)
        return {key: _value(child, root, (*path, key)) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_value(child, root, (*path, index)) for index, child in enumerate(value)]
    return value


def _fail(what: str, error: BaseException, root: CodeRoot, where: str | None) -> NoReturn:
    raise user_error(what, error, root, where=where) from error


def user_error(
    what: str, error: BaseException, root: CodeRoot, *, where: str | None, fix: str | None = None
) -> UserCodeError:
    """What user code has raised as an error of ours, with the user's own frames."""
    # The exception's own text may span lines or even raise: format_exception_only copes with both.
    text = traceback.format_exception_only(error)
    frames = traceback.format_list(user_frames(error, root))
    return UserCodeError(what, where=where, why="".join([*frames, *text]).rstrip(), fix=fix)


def user_frames(error: BaseException, root: CodeRoot) -> list[traceback.FrameSummary]:
    """The user's own frames in an error's traceback; where there are none, those of the library that raised."""
    stack = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", _OURS, _IMPORTLIB))
    ]
    folders = tuple(f"{folder}{os.sep}" for folder in root.folders)
    users = [f for f in stack if f.filename.startswith(folders) and "site-packages" not in f.filename]
    return users or stack
