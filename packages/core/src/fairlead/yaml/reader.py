"""Text to data and positions.

PyYAML (libyaml where it is installed) reads the text into nodes, which keep both of two equal keys with their lines.
Its constructor would keep the last of them, know only YAML 1.1, and let a few lines of nested aliases grow to
gigabytes: what the nodes mean is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.composer import ComposerError

from fairlead.errors import ConfigError
from fairlead.yaml.scalars import Scalar, resolve_plain
from fairlead.yaml.syntax import syntax_error

__all__ = ["Document", "load", "parse_scalar_or_flow"]

Path = tuple[str | int, ...]

MAX_DEPTH = 100
MAX_ALIASED_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
_PLAIN = "?"  # the tag of what has none and stands in no quotes, as YAML's specification writes it
_QUOTE = "quote it if it is meant as text"


@dataclass(slots=True)
class _Node:
    """A value, where it stands, and how large it is with every alias in it written out."""

    line: int
    value: Scalar | list[_Node] | dict[str, tuple[int, _Node]]  # mapping: key -> (line of the key, value)
    size: int = 1
    height: int = 1

    def data(self) -> object:
        """Plain Python; an alias becomes a copy, so changing one place never changes another."""
        if isinstance(self.value, dict):
            return {key: child.data() for key, (_, child) in self.value.items()}
        if isinstance(self.value, list):
            return [child.data() for child in self.value]
        return self.value


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML document: plain data, and the line of each part of it.

    Attributes:
        data: dict, list, str, int, float, bool or None, nested. None for an empty file.
        source: The name for error messages: the file as the user wrote it.
    """

    data: object
    source: str
    _root: _Node | None = field(default=None, repr=False, compare=False)

    def line(self, path: Path) -> int | None:
        """The 1-based line of a key or an item, or of its nearest parent that exists; None if the document is empty.

        A value that came through an alias or a merge key has the line where it is written.

        Example:
            >>> load("a:\\n  b: 1\\n", source="f.yaml").line(("a", "c"))
            1
        """
        if self._root is None:
            return None
        line, node = self._root.line, self._root
        for part in path:
            if isinstance(node.value, dict) and isinstance(part, str) and part in node.value:
                line, node = node.value[part]
            elif isinstance(node.value, list) and isinstance(part, int) and 0 <= part < len(node.value):
                node = node.value[part]
                line = node.line
            else:
                break
        return line


class _Rules:
    """What a PyYAML loader asks while it reads into nodes: a depth, and no YAML 1.1 meaning of unquoted scalars."""

    _depth = 0

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _TAG + "str"
        return _TAG + ("seq" if kind is yaml.SequenceNode else "map")

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
    """From PyYAML's nodes to ours: the aliases bounded, every key a name that stands once in its mapping."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source = text, source
        self.read: dict[int, _Node | None] = {}  # by id of PyYAML's node; None: still being read
        self.aliases = 0
        self.aliased = 0  # values in them

    def error(self, line: int, what: str, *, why: str | None = None, fix: str | None = None) -> ConfigError:
        return ConfigError(what, where=f"{self.source}:{line}", why=why, fix=fix)

    def node(self, node: yaml.Node, depth: int) -> _Node:
        """One value; PyYAML puts the node that an anchor names in the place of each alias."""
        if id(node) in self.read:
            return self.alias(self.read[id(node)], depth)
        self.read[id(node)] = None
        if isinstance(node, yaml.ScalarNode):
            done = _Node(_line(node), self.scalar(node))
        elif node.tag != _TAG + ("seq" if isinstance(node, yaml.SequenceNode) else "map"):
            raise self.unknown_tag(node)
        elif isinstance(node, yaml.SequenceNode):
            items = [self.node(item, depth + 1) for item in node.value]
            done = _measured(_Node(_line(node), items), items)
        else:
            assert isinstance(node, yaml.MappingNode)
            done = self.mapping(node, depth)
        self.read[id(node)] = done
        return done

    def alias(self, node: _Node | None, depth: int) -> _Node:
        self.aliases += 1
        if node is None:
            line, name = self.last_alias()
            raise self.error(line, f"the alias *{name} is inside the value that &{name} names", why="it has no end")
        self.aliased += node.size
        if self.aliased > MAX_ALIASED_VALUES or depth + node.height > MAX_DEPTH:
            raise self.error(
                self.last_alias()[0],
                "the aliases of this file grow too large",
                why=f"written out they hold more than {MAX_ALIASED_VALUES} values or {MAX_DEPTH} levels",
            )
        return node

    def last_alias(self) -> tuple[int, str]:
        """The line and the name of the alias that was read last: nodes know only the place of their anchor."""
        events = yaml.parse(self.text, Loader=_loader())
        event = [event for event in events if isinstance(event, yaml.AliasEvent)][self.aliases - 1]
        return _line(event), str(event.anchor)

    def scalar(self, node: yaml.ScalarNode) -> Scalar:
        tag, text = node.tag, str(node.value)
        if tag == _TAG + "str" or (tag == _PLAIN and self.is_non_specific(node)):
            return text
        try:
            value = resolve_plain(text)
        except ValueError as error:
            raise self.error(_line(node), str(error), fix=_QUOTE) from None
        if tag == _PLAIN:
            return value
        if tag == _TAG + "float" and type(value) is int:
            return float(value)
        wanted = {"int": int, "float": float, "bool": bool, "null": type(None)}.get(tag.removeprefix(_TAG))
        if wanted is None:
            raise self.unknown_tag(node)
        if type(value) is not wanted:
            raise self.error(_line(node), f"{text[:40]!r} is not a !!{tag.removeprefix(_TAG)}")
        return value

    def is_non_specific(self, node: yaml.ScalarNode) -> bool:
        """`! 1` is text; PyYAML's composer takes the tag `!` for none."""
        written = self.text[node.start_mark.index : node.end_mark.index]
        return written.startswith(("!", "&")) and "!" in written.split()[:2]

    def unknown_tag(self, node: yaml.Node) -> ConfigError:
        tag = str(node.tag).replace(_TAG, "!!")
        return self.error(_line(node), f"the YAML tag {tag} is not supported", fix=f"remove {tag}, or {_QUOTE}")

    def mapping(self, node: yaml.MappingNode, depth: int) -> _Node:
        own: dict[str, tuple[int, _Node]] = {}
        merged: dict[str, tuple[int, _Node]] = {}
        merge_line: int | None = None
        for key_node, value in node.value:
            if id(key_node) in self.read:
                self.aliases += 1
                raise self.error(self.last_alias()[0], "an alias cannot be a key", why="every key is a name")
            line = _line(key_node)
            if _is_merge(key_node):
                if merge_line is not None:
                    raise self.twice("<<", merge_line, line)
                merge_line, merged = line, self.merge(value, depth, line)
                continue
            key = self.key(key_node)
            if key in own:
                raise self.twice(key, own[key][0], line)
            own[key] = line, self.node(value, depth + 1)
        entries = {**merged, **own}
        return _measured(_Node(_line(node), entries), [child for _, child in entries.values()])

    def key(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            value = self.node(node, 1).value
            if isinstance(value, str):
                return value
            text = node.value or '""'
            what = f"the key {text} is not text"
            fix = f'write "{node.value}":' if node.value else "write the key before ':'"
        else:
            what, fix = "a list or a mapping cannot be a key", "quote it if it is text: a value that starts with { or ["
        raise self.error(_line(node), what, why="every key is a name", fix=fix)

    def twice(self, key: str, first: int, second: int) -> ConfigError:
        return self.error(
            second,
            f"the key {key!r} stands twice in one mapping",
            why=f"on line {first} and on line {second}; only one of them could count",
            fix="remove one of the two",
        )

    def merge(self, node: yaml.Node, depth: int, line: int) -> dict[str, tuple[int, _Node]]:
        """`<<: *defaults` and `<<: [*first, *second]`; of two equal keys the first one counts."""
        value = self.node(node, depth + 1)
        sources = value.value if isinstance(value.value, list) else [value]
        entries: dict[str, tuple[int, _Node]] = {}
        for one in sources:
            if not isinstance(one.value, dict):
                raise self.error(
                    line,
                    "'<<' takes a mapping or a list of mappings",
                    fix="write <<: *name, where &name is on a mapping before it",
                )
            entries = {**one.value, **entries}
        return entries


def _line(node: yaml.Node | yaml.Event) -> int:
    assert node.start_mark is not None
    return int(node.start_mark.line) + 1


def _is_merge(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value == "<<" and node.tag in (_PLAIN, _TAG + "merge")


def _measured(node: _Node, children: list[_Node]) -> _Node:
    node.size = 1 + sum(child.size for child in children)
    node.height = 1 + max((child.height for child in children), default=0)
    return node


def _compose(text: str, source: str) -> _Node | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise ConfigError("this is not valid text", where=f"{source}:{line}", why=str(error)) from None
    try:
        root = yaml.compose(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise syntax_error(error, text, source) from None
    return None if root is None else _Reader(text, source).node(root, 1)


def load(text: str, *, source: str) -> Document:
    """Reads one YAML document.

    Every key is a string (`1: x` is an error that says how to quote it), a key stands once in a
    mapping, anchors and the merge key `<<` work within bounds, tags other than YAML's own scalars
    and collections are refused.

    Args:
        text: The document; a leading byte order mark is ignored.
        source: The name for error messages.

    Raises:
        ConfigError: With `where` as `source:line`.

    Example:
        >>> load("lr: 1e-3", source="job.yaml").data
        {'lr': 0.001}
    """
    root = _compose(text.removeprefix("\ufeff"), source)
    return Document(None if root is None else root.data(), source, root)


def parse_scalar_or_flow(text: str, *, source: str = "--set") -> object:
    """The value of `--set PATH=VALUE`: exactly what `PATH: VALUE` on one line of a job file would mean.

    An empty value is therefore null; the empty string is written `''` (in a shell: `--set "x=''"`).
    Lists and mappings are written in flow style: `[1, 2]`, `{name: ddp}`.

    Raises:
        ConfigError: Not one YAML value. `where` is `source`.

    Example:
        >>> parse_scalar_or_flow("{name: ddp, bucket_cap_mb: 25}")
        {'name': 'ddp', 'bucket_cap_mb': 25}
    """
    fix = "put the value in quotes of its own: --set 'x=\"...\"'"
    if text.lstrip().startswith("#"):
        raise ConfigError(f"the value {text!r} is a YAML comment", where=source, fix=fix)
    try:
        root = _compose(text.removeprefix("\ufeff"), source)
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
    return None if root is None else root.data()
