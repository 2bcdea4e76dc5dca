"""Text to data and lines.

PyYAML (libyaml where it is installed) reads the text into nodes; its constructor would keep the last of two equal
keys, know only YAML 1.1, and let a few lines of nested aliases grow to gigabytes: what nodes mean is decided here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import ComposerError

from fairlead.errors import ConfigError

Scalar = str | int | float | bool | None

_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **{sign + word: float(sign + "inf") for sign in ("", "+", "-") for word in (".inf", ".Inf", ".INF")},
}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL_OR_HEX = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_DIGITS = 4000  # int() itself refuses more than 4300 decimal digits


def resolve_plain(text: str) -> Scalar:
    """The value of an unquoted scalar; `ValueError`: a number that Python cannot hold (`1e999`, too many digits)."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _DECIMAL.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} digits")
        return int(text)
    if _OCTAL_OR_HEX.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if math.isinf(value):
            raise ValueError(f"{text[:40]} is beyond the largest float; infinity is written .inf")
        return value
    return text


Path = tuple[str | int, ...]
Entries = dict[str | int, tuple[int, yaml.Node]]

MAX_DEPTH = 100
MAX_ALIASED_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
_PLAIN = "?"  # the tag of what has none and stands in no quotes, as YAML's specification writes it
_COLLECTIONS: dict[type[yaml.Node], str] = {yaml.SequenceNode: "seq", yaml.MappingNode: "map"}
_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "null": type(None)}
_QUOTE = "quote it if it is meant as text"


class Unquoted(str):
    """A text with a variable, `${env:N}`, in no quotes: the variable's value is read as YAML."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document: plain data, None for an empty file, and the line of each part of it."""

    data: object
    source: str
    _lines: dict[Path, int] = field(default_factory=dict, repr=False, compare=False)

    def line(self, path: Path) -> int | None:
        """The 1-based line of a key or an item, or of its nearest parent that exists; None if the document is empty.

        A value that came through an alias or a merge key has the line where it is written.
        """
        while path and path not in self._lines:
            path = path[:-1]
        return self._lines.get(path)


class _Rules:
    """What a PyYAML loader asks while it reads into nodes: a depth, and no YAML 1.1 meaning of unquoted scalars."""

    _depth = 0

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _TAG + "str"
        return _TAG + _COLLECTIONS[kind]

    def descend_resolver(self, current_node: Any, current_index: Any) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ComposerError(None, None, f"nested more than {MAX_DEPTH} levels deep", current_node.start_mark)

    def ascend_resolver(self) -> None:
        self._depth -= 1


def _loader() -> Any:
    # libyaml's parser is about ten times faster; PyYAML can be built without it.
    return type("_Loader", (_Rules, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), {})


class _Reader:
    """From PyYAML's nodes to data: every key a name that stands once in its mapping, each alias a bounded copy."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines: dict[Path, int] = {}
        self.seen: set[int] = set()  # PyYAML puts the node that an anchor names in place of each alias
        self.inside: list[int] = []
        self.aliased = 0  # values that are written by aliases

    def error(self, node: yaml.Node | int, what: str, *, why: str | None = None, fix: str | None = None) -> ConfigError:
        line = node if isinstance(node, int) else _line(node)
        return ConfigError(what, where=f"{self.source}:{line}", why=why, fix=fix)

    def value(self, node: yaml.Node, path: Path = ()) -> object:
        """One value, with the lines of what is in it."""
        self.lines.setdefault(path, _line(node))
        self.enter(node)
        data: object
        if isinstance(node, yaml.ScalarNode):
            data = self.scalar(node)
        elif isinstance(node, yaml.SequenceNode):
            data = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        else:
            entries = self.entries(node)
            self.lines.update({(*path, key): line for key, (line, _) in entries.items()})
            data = {key: self.value(child, (*path, key)) for key, (_, child) in entries.items()}
        self.inside.pop()
        return data

    def enter(self, node: yaml.Node) -> None:
        """Bounds what aliases may add: a few lines of them can stand for gigabytes."""
        if id(node) in self.inside:
            raise self.error(node, "an alias is inside the value that its own anchor names", why="it has no end")
        if not isinstance(node, yaml.ScalarNode) and node.tag != _TAG + _COLLECTIONS[type(node)]:
            raise self.unknown_tag(node)
        self.aliased += id(node) in self.seen
        self.seen.add(id(node))
        self.inside.append(id(node))
        if self.aliased > MAX_ALIASED_VALUES or len(self.inside) > MAX_DEPTH:
            why = f"written out they hold more than {MAX_ALIASED_VALUES} values or {MAX_DEPTH} levels"
            raise self.error(node, "the aliases of this file grow too large", why=why)

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        tag, text = node.tag, str(node.value)
        if tag == _TAG + "str":
            return text
        try:
            value = resolve_plain(text)
        except ValueError as error:
            raise self.error(node, str(error), fix=_QUOTE) from None
        if tag == _PLAIN:
            return Unquoted(value) if isinstance(value, str) and "${env:" in value else value
        kind = tag.removeprefix(_TAG)
        if kind not in _TYPES:
            raise self.unknown_tag(node)
        if kind == "float" and type(value) is int:
            return float(value)
        if type(value) is not _TYPES[kind]:
            raise self.error(node, f"{text[:40]!r} is not a !!{kind}")
        return value

    def unknown_tag(self, node: yaml.Node) -> ConfigError:
        tag = str(node.tag).replace(_TAG, "!!")
        return self.error(node, f"the YAML tag {tag} is not supported", fix=f"remove {tag}, or {_QUOTE}")

    def entries(self, node: yaml.Node) -> Entries:
        """The keys of a mapping with their lines and values, those that it merges in first."""
        own: Entries = {}
        seen: dict[str, int] = {}
        merged: Entries = {}
        merge_line: int | None = None
        for key_node, value in node.value:
            line = _line(key_node)
            if _is_merge(key_node):
                if merge_line is not None:
                    raise self.twice("<<", merge_line, line)
                merge_line, merged = line, self.merge(value, line)
                continue
            key = self.key(key_node)
            if str(key) in seen:  # 0 and "0" would be one setting's name
                raise self.twice(key, seen[str(key)], line)
            own[key], seen[str(key)] = (line, value), line
        return {**merged, **own}

    def merge(self, node: yaml.Node, line: int) -> Entries:
        """`<<: *defaults` and `<<: [*first, *second]`; of two equal keys the first one counts."""
        found: Entries = {}
        for one in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            if not isinstance(one, yaml.MappingNode):
                fix = "write <<: *name, where &name is on a mapping before it"
                raise self.error(line, "'<<' takes a mapping or a list of mappings", fix=fix)
            self.enter(one)
            found = {**self.entries(one), **found}
            self.inside.pop()
        return found

    def key(self, node: yaml.Node) -> str | int:
        if isinstance(node, yaml.ScalarNode):
            key = self.scalar(node)
            if isinstance(key, str) or type(key) is int:
                return key
            text = node.value or '""'
            what = f"the key {text} is neither text nor an integer"
            fix = f'write "{node.value}":' if node.value else "write the key before ':'"
        else:
            what, fix = "a list or a mapping cannot be a key", "quote it if it is text: a value that starts with { or ["
        raise self.error(node, what, why="every key is a name or a number", fix=fix)

    def twice(self, key: str | int, first: int, second: int) -> ConfigError:
        return self.error(
            second,
            f"the key {key!r} stands twice in one mapping",
            why=f"on line {first} and on line {second}; only one of them could count",
            fix="remove one of the two",
        )


def _line(node: yaml.Node | yaml.Event) -> int:
    assert node.start_mark is not None
    return int(node.start_mark.line) + 1


def _is_merge(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<" and node.tag in (_PLAIN, _TAG + "merge")


def load(text: str, *, source: str) -> Document:
    """Reads one YAML document; `ConfigError.where` is `source:line`.

    Every key is text or an integer that stands once in its mapping, anchors and the merge key `<<` work within bounds,
    and tags other than YAML's own scalars and collections are refused.
    """
    text = text.removeprefix("\ufeff")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise ConfigError("this is not valid text", where=f"{source}:{line}", why=str(error)) from None
    try:
        root = yaml.compose(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise syntax_error(error, text, source) from None
    reader = _Reader(source)
    data = None if root is None else reader.value(root)
    return Document(data, source, reader.lines)


def parse_scalar_or_flow(text: str, *, source: str = "--set") -> object:
    """The value of `--set PATH=VALUE`: exactly what `PATH: VALUE` on one line of a job file would mean.

    An empty value is therefore null; the empty string is written `''` (in a shell: `--set "x=''"`). Lists and mappings
    are written in flow style: `[1, 2]`, `{name: ddp}`.
    """
    fix = "put quotes around the value: --set 'x=\"...\"'"
    if text.lstrip().startswith("#"):
        raise ConfigError(f"the value {text!r} is a YAML comment", where=source, fix=fix)
    try:
        data = load(text, source=source).data
        blocks = any(
            (isinstance(event, yaml.CollectionStartEvent) and not event.flow_style)
            or (isinstance(event, yaml.DocumentStartEvent) and event.explicit)
            for event in yaml.parse(text, Loader=_loader())
        )
    except ConfigError as error:
        raise ConfigError(
            f"the value {text[:80]!r} is not YAML: {error.what}", where=source, why=error.why, fix=fix
        ) from None
    if blocks:
        raise ConfigError(
            f"the value {text[:80]!r} is not a scalar, a [list] or a {{mapping}}",
            where=source,
            why="': ' and a leading '- ' or '---' have a meaning in YAML",
            fix=fix,
        )
    return data


_TAB_INDENT = re.compile(r" *\t")


def syntax_error(error: yaml.YAMLError, text: str, source: str) -> ConfigError:
    """The error for the user; `text` is what was parsed."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return _marked(error, text, source)
    # A ReaderError counts characters in PyYAML and bytes in libyaml: look for the character itself.
    bad = next((i for i, char in enumerate(text) if not (char.isprintable() or char in "\n\r\t\x85\ufeff")), None)
    if bad is None:
        return ConfigError("this is not YAML", where=source, why=str(error))
    return ConfigError(
        f"the character U+{ord(text[bad]):04X} is not allowed in YAML",
        where=f"{source}:{text.count(chr(10), 0, bad) + 1}",
        fix=f'remove it, or write it as an escape in double quotes: "\\u{ord(text[bad]):04x}"',
    )


def _marked(error: yaml.MarkedYAMLError, text: str, source: str) -> ConfigError:
    """PyYAML's own words; what they do not say is where a quote or bracket was opened, and tabs."""
    assert error.problem_mark is not None
    lines = text.splitlines()
    line = int(error.problem_mark.line) + 1
    opened = line if error.context_mark is None else int(error.context_mark.line) + 1
    line = opened if line > len(lines) else line  # the end of the file, where a quote or a bracket is missing
    shown = lines[line - 1] if line <= len(lines) else ""
    if _TAB_INDENT.match(shown):
        return ConfigError(
            "a tab indents this line",
            where=f"{source}:{line}",
            why="YAML allows only spaces for indentation",
            fix="replace the tab by spaces (editors: 'convert indentation to spaces')",
        )
    context = f"{error.context} that starts on line {opened}" if error.context and opened != line else error.context
    fix = 'quote text that YAML reads otherwise (key: "a: b"), close each quote and bracket, align keys in one column'
    if "${" in shown:
        fix = f"{fix}\na number with ${{env:...}} needs its own line, without brackets around it"
    why = ", ".join(part for part in (context, error.problem) if part)
    return ConfigError("this is not YAML", where=f"{source}:{line}", why=why, fix=fix)
