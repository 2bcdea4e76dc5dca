"""`--set PATH=VALUE`, and a later job file: values of a job are replaced, never merged with the ones before.

Setting `x.name` of a plugin node replaces the node: its other fields belong to the plugin that was there.
Setting `x.other` of a literal (`strategy: ddp`) makes a mapping of it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from fairlead.config_bases import AXES
from fairlead.errors import ConfigError
from fairlead.yaml import parse_scalar_or_flow

_PATH: Final = re.compile(r"[^.\[\]]+|\[[0-9]+\]")
_WHOLE: Final = re.compile(r"[^.\[\]]+(\.[^.\[\]]+|\[[0-9]{1,9}\])*")
_INDEX: Final = re.compile(r"[0-9]{1,9}")  # not str.isdigit(), to which a superscript two is a digit
_CLASS_FIELDS: Final = frozenset({("model",), ("data",), ("trainer", "profiler")})

Path = tuple[str | int, ...]


def parse_override(text: str) -> tuple[Path, Any]:
    """The path and the value of one `--set`: `("trainer", "loggers", 0, "name")` of `trainer.loggers[0].name=csv`."""
    path_text, equals, value = text.partition("=")
    path_text = path_text.strip()
    if not equals or not _WHOLE.fullmatch(path_text):
        raise ConfigError(
            f"--set {text!r} is not PATH=VALUE",
            where="--set",
            fix="write for example --set trainer.max_steps=100 or --set trainer.loggers[0].name=csv",
        )
    parts = [
        int(p[1:-1]) if p.startswith("[") else int(p) if _INDEX.fullmatch(p) else p for p in _PATH.findall(path_text)
    ]
    return tuple(parts), parse_scalar_or_flow(value, source=f"--set {path_text}")


def apply_override(data: Any, path: Path, value: Any) -> Any:
    """A copy of the job's data with one value replaced; `ConfigError` where the path leads into what has no parts."""
    root = copy.deepcopy(data) if data is not None else {}
    if len(path) > 1 and path[-1] == "name" and _is_plugin_node(path[:-1]):
        path, value = path[:-1], {"name": value}
    parent: Any = None
    node = root
    for depth, part in enumerate(path[:-1]):
        node = _promoted(parent, path, depth, node)
        parent, node = node, _child(node, part, path, depth, create=path[depth + 1])
    node = _promoted(parent, path, len(path) - 1, node)
    last = path[-1]
    if isinstance(node, list):
        if not isinstance(last, int) or last > len(node):
            raise _misplaced(path, len(path) - 1, f"a list of {len(node)}")
        node[last : last + 1] = [value]
    elif isinstance(node, dict):
        node[_key(node, last)] = value
    else:
        raise _misplaced(path, len(path) - 1, repr(node))
    return root


def merge(
    data: dict[Any, Any], later: Mapping[Any, Any], replaced: Callable[[Path], None], *, within: Path = ()
) -> None:
    """Applies a later job file, in place; `replaced` is called with the path of each setting.

    A mapping in `later` sets what it names and leaves the rest; a plugin's with its `name` replaces the node, as does
    everything else: a number, a text, a list, null, an empty mapping. `within` is the path of `data` in the job.
    """
    for given, value in later.items():
        key = next((one for one in data if str(one) == str(given)), given)  # 0 and "0" would be one setting's name
        path = (*within, key)
        if isinstance(value, Mapping) and value and not (_is_plugin_node(path) and "name" in value):
            node = _promoted(data, path, len(path), data.get(key))
            if isinstance(node, dict) and node:
                merge(node, value, replaced, within=path)
                continue
        data[key] = copy.deepcopy(value)
        replaced(path)


def _is_plugin_node(path: Path) -> bool:
    """Whether a path leads to a field that holds a plugin."""
    if len(path) < 2 or path[0] != "trainer":
        return False
    return path[1] in AXES if len(path) == 2 else len(path) == 3 and path[1] in {"loggers", "plugins"}


def _promoted(parent: Any, path: Path, depth: int, node: Any) -> Any:
    """A literal of a plugin or class node, turned into the mapping it stands for, in place."""
    if not isinstance(node, (str, int)) or isinstance(node, bool) or parent is None:
        return node
    here = path[:depth]
    if _is_plugin_node(here):
        promoted: dict[str, Any] = {"name": node}
    elif here == ("submit",):
        promoted = {"to": node}
    elif here in _CLASS_FIELDS or (len(here) == 3 and here[:2] == ("trainer", "callbacks")):
        promoted = {"class": node}
    else:
        return node
    parent[here[-1]] = promoted
    return promoted


def _child(node: Any, part: str | int, path: Path, depth: int, *, create: str | int) -> Any:
    empty: Any = [] if isinstance(create, int) else {}
    if isinstance(node, list):
        if not isinstance(part, int) or part > len(node):
            raise _misplaced(path, depth, f"a list of {len(node)}")
        if part == len(node):
            node.append(empty)
        return node[part]
    if isinstance(node, dict):
        key = _key(node, part)
        if node.get(key) is None:
            node[key] = empty
        return node[key]
    raise _misplaced(path, depth, repr(node))


def _key(node: dict[Any, Any], part: str | int) -> str | int:
    """A part of a path as a key: an integer where the mapping has integers, as a schedule by epochs does."""
    return part if isinstance(part, int) and any(type(key) is int for key in node) else str(part)


def _misplaced(path: Path, depth: int, found: str) -> ConfigError:
    from fairlead.validation import dotted

    where = dotted(path[:depth]) or "the job"
    return ConfigError(
        f"--set {dotted(path)}: {where} is {found} and has no {path[depth]!r}",
        where=f"--set {dotted(path)}",
        fix=f"set {where} itself, or correct the path",
    )
