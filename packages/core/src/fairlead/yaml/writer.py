"""Data to YAML that every reader understands alike.

The tools of others mostly read YAML 1.1, where `1e-3` is text and `off` is false: whatever means something other than
its text in either version is quoted, and every float has a point and a signed exponent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

from fairlead.errors import ConfigError
from fairlead.yaml.reader import MAX_DEPTH, resolve_plain

# YAML 1.1 has them as booleans; PyYAML does not read them so, other readers do.
_SHORT_BOOLEANS = frozenset("yYnN")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)  # the items of a list stand further in than their key


def _represent_str(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))


def _style(text: str) -> str | None:
    if not text.replace("\n", "").isprintable():
        return '"'
    if "\n" in text:
        # A literal block reads well (setup scripts), but only without white space at any edge.
        lines = text.removesuffix("\n").split("\n")
        plain = lines[0].strip() and all(not line or not line[-1].isspace() for line in lines) and lines[-1]
        return "|" if plain and not lines[0][0].isspace() else '"'
    if text in _SHORT_BOOLEANS:
        return "'"
    try:
        same = resolve_plain(text) == text
    except ValueError:
        same = False
    return None if same else "'"  # None: PyYAML still quotes what YAML 1.1 would read as something else


_Dumper.add_representer(str, _represent_str)


def dump(data: object) -> str:
    """Writes plain data as a YAML document, keys in their order, without aliases; anything else is a `TypeError`."""
    plain = _plain(data, ())
    return yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=2**31 - 1
    )


def _plain(value: object, path: tuple[str | int, ...]) -> object:
    location = ".".join(map(str, path)) or "the document"
    if len(path) >= MAX_DEPTH:
        raise ValueError(f"{'.'.join(map(str, path[:5]))}...: nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if _SURROGATE.search(value):
            raise ConfigError(
                "a text is not valid Unicode", where=location, why=f"{value[:40]!a} holds a lone surrogate"
            )
        return str.__str__(value)  # the text of a StrEnum member, not its name
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) and type(key) is not int:
                raise TypeError(f"{location}: the key {key!r} is neither text nor an integer")
        return {_plain(key, path): _plain(child, (*path, str(key))) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child, (*path, i)) for i, child in enumerate(value)]
    raise TypeError(f"{location}: a {type(value).__name__} cannot be written as YAML")
