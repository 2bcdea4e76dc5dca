"""Text to data and positions.

PyYAML's event parser (libyaml's where it is installed) does the syntax; the tree is composed here,
because PyYAML's own composer keeps the last of two equal keys, knows only YAML 1.1, and lets a few
lines of nested aliases grow to gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from fairlead.errors import ConfigError
from fairlead.yaml.scalars import Scalar, resolve_plain
from fairlead.yaml.syntax import syntax_error

__all__ = ["Document", "load", "parse_scalar_or_flow"]

Path = tuple[str | int, ...]

MAX_DEPTH = 100
MAX_ALIASED_VALUES = 100_000
_TAG = "tag:yaml.org,2002:"
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


class _Composer:
    def __init__(self, text: str, source: str) -> None:
        self.source = source
        # libyaml's parser is about ten times faster; PyYAML can be built without it.
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.anchors: dict[str, _Node | None] = {}  # None: still being read, so an alias to it would be a cycle
        self.aliased = 0

    def error(self, event: yaml.Event, what: str, *, why: str | None = None, fix: str | None = None) -> ConfigError:
        return ConfigError(what, where=f"{self.source}:{_line(event)}", why=why, fix=fix)

    def document(self) -> tuple[_Node | None, bool]:
        """The only document of the stream, and whether it was opened by `---`."""
        next(self.events)  # stream start
        start = next(self.events)
        if not isinstance(start, yaml.DocumentStartEvent):
            return None, False
        node = self.node(next(self.events), 1)
        next(self.events)  # document end
        after = next(self.events)
        if isinstance(after, yaml.DocumentStartEvent):
            raise self.error(
                after,
                "a second YAML document starts here",
                why="a file holds one document; '---' starts another",
                fix="remove the '---' line, or move what follows into a file of its own",
            )
        return node, bool(start.explicit)

    def node(self, event: yaml.Event, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise self.error(event, f"nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event, depth)
        assert isinstance(event, yaml.NodeEvent)
        anchor = event.anchor
        if anchor is not None:
            self.anchors[anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = _Node(_line(event), self.scalar(event))
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self.sequence(event, depth)
        else:
            assert isinstance(event, yaml.MappingStartEvent)
            node = self.mapping(event, depth)
        if anchor is not None:
            self.anchors[anchor] = node
        return node

    def alias(self, event: yaml.AliasEvent, depth: int) -> _Node:
        name = str(event.anchor)
        if name not in self.anchors:
            raise self.error(event, f"no anchor &{name} before the alias *{name}", fix=f"define &{name}, or {_QUOTE}")
        node = self.anchors[name]
        if node is None:
            raise self.error(event, f"the alias *{name} is inside the value that &{name} names", why="it has no end")
        self.aliased += node.size
        if self.aliased > MAX_ALIASED_VALUES or depth + node.height > MAX_DEPTH:
            raise self.error(
                event,
                "the aliases of this file grow too large",
                why=f"written out they hold more than {MAX_ALIASED_VALUES} values or {MAX_DEPTH} levels",
            )
        return node

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        tag, text = event.tag, str(event.value)
        if tag is None and not event.implicit[0]:
            return text
        if tag in ("!", _TAG + "str"):
            return text
        try:
            value = resolve_plain(text)
        except ValueError as error:
            raise self.error(event, str(error), fix=_QUOTE) from None
        if tag is None:
            return value
        if tag == _TAG + "float" and type(value) is int:
            return float(value)
        wanted = {"int": int, "float": float, "bool": bool, "null": type(None)}.get(tag.removeprefix(_TAG))
        if wanted is None:
            raise self.unknown_tag(event)
        if type(value) is not wanted:
            raise self.error(event, f"{text[:40]!r} is not a !!{tag.removeprefix(_TAG)}")
        return value

    def unknown_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> ConfigError:
        tag = str(event.tag).replace(_TAG, "!!")
        return self.error(event, f"the YAML tag {tag} is not supported", fix=f"remove {tag}, or {_QUOTE}")

    def sequence(self, start: yaml.SequenceStartEvent, depth: int) -> _Node:
        if start.tag not in (None, "!", _TAG + "seq"):
            raise self.unknown_tag(start)
        items: list[_Node] = []
        node = _Node(_line(start), items)
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return _measured(node, items)

    def mapping(self, start: yaml.MappingStartEvent, depth: int) -> _Node:
        if start.tag not in (None, "!", _TAG + "map"):
            raise self.unknown_tag(start)
        own: dict[str, tuple[int, _Node]] = {}
        merged: dict[str, tuple[int, _Node]] = {}
        merge_line: int | None = None
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            line = _line(event)
            if _is_merge(event):
                if merge_line is not None:
                    raise self.twice(event, "<<", merge_line)
                merge_line, merged = line, self.merge(event, depth)
                continue
            key = self.key(event)
            if key in own:
                raise self.twice(event, key, own[key][0])
            own[key] = line, self.node(next(self.events), depth + 1)
        entries = {**merged, **own}
        return _measured(_Node(_line(start), entries), [child for _, child in entries.values()])

    def key(self, event: yaml.Event) -> str:
        fix = None
        if isinstance(event, yaml.ScalarEvent):
            value = self.node(event, 1).value
            if isinstance(value, str):
                return value
            text = str(event.value) or '""'
            what, fix = f"the key {text} is not text", f'write "{text}":' if event.value else "write the key before ':'"
        elif isinstance(event, yaml.AliasEvent):
            what = "an alias cannot be a key"
        else:
            what, fix = "a list or a mapping cannot be a key", "quote it if it is text: a value that starts with { or ["
        raise self.error(event, what, why="every key is a name", fix=fix)

    def twice(self, event: yaml.Event, key: str, first: int) -> ConfigError:
        second = _line(event)
        return self.error(
            event,
            f"the key {key!r} stands twice in one mapping",
            why=f"on line {first} and on line {second}; only one of them could count",
            fix="remove one of the two",
        )

    def merge(self, event: yaml.Event, depth: int) -> dict[str, tuple[int, _Node]]:
        """`<<: *defaults` and `<<: [*first, *second]`; of two equal keys the first one counts."""
        value = self.node(next(self.events), depth + 1)
        sources = value.value if isinstance(value.value, list) else [value]
        entries: dict[str, tuple[int, _Node]] = {}
        for node in sources:
            if not isinstance(node.value, dict):
                raise self.error(
                    event,
                    "'<<' takes a mapping or a list of mappings",
                    fix="write <<: *name, where &name is on a mapping before it",
                )
            entries = {**node.value, **entries}
        return entries


def _line(event: yaml.Event) -> int:
    assert event.start_mark is not None
    return int(event.start_mark.line) + 1


def _is_merge(event: yaml.Event) -> bool:
    return (
        isinstance(event, yaml.ScalarEvent)
        and event.value == "<<"
        and event.tag in (None, _TAG + "merge")
        and bool(event.implicit[0] or event.tag)
    )


def _measured(node: _Node, children: list[_Node]) -> _Node:
    node.size = 1 + sum(child.size for child in children)
    node.height = 1 + max((child.height for child in children), default=0)
    return node


def _compose(text: str, source: str) -> tuple[_Node | None, bool]:
    text = text.removeprefix("\ufeff")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise ConfigError("this is not valid text", where=f"{source}:{line}", why=str(error)) from None
    try:
        return _Composer(text, source).document()
    except yaml.YAMLError as error:
        raise syntax_error(error, text, source) from None


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
    root, _ = _compose(text, source)
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
        root, explicit = _compose(text, source)
        blocks = any(
            isinstance(event, yaml.CollectionStartEvent) and not event.flow_style
            for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        )
    except ConfigError as error:
        raise ConfigError(
            f"the value {text[:80]!r} is not YAML: {error.what}", where=source, why=error.why, fix=fix
        ) from None
    if blocks or explicit:
        raise ConfigError(
            f"the value {text[:80]!r} is not a scalar, a [list] or a {{mapping}}",
            where=source,
            why="': ' and a leading '- ' or '---' have a meaning in YAML",
            fix=fix,
        )
    return None if root is None else root.data()
