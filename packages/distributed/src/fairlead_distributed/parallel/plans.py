"""How each layer of a model is to be split: plans in words, and the plans of blocks that are known."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from fairlead.errors import ConfigError, did_you_mean
from fairlead.patterns import near_pattern

WORDS = {
    "colwise": "a linear layer whose output features are split",
    "rowwise": "a linear layer whose input features are split; its outputs are added up",
    "packed:1,1,1": "a colwise layer that packs several in one (queries, keys and values), with their proportions",
    "vocab": "an embedding, or the linear head, whose vocabulary is split",
    "summed": "a layer whose weights are replicated, applied to each rank's own heads (a norm of queries or keys)",
    "replicate": "a layer that every rank has in full, as all that are not named",
    "sequence": "with sequence_parallel: a norm that each rank applies to its part of the sequence",
    "sequence_begin": "with sequence_parallel: a module whose input is split along the sequence",
    "sequence_gather": "with sequence_parallel: a module (attention) whose input is gathered for its colwise layers",
    "sequence_end": "with sequence_parallel: a norm like `sequence`, whose output is gathered",
}
"""The words of a plan."""

HEADS = (
    *("heads", "n_head", "n_heads", "nhead", "num_heads", "num_attention_heads"),
    *("kv_heads", "n_kv_head", "n_kv_heads", "num_kv_heads", "num_key_value_heads"),
)
"""Attributes that hold a number of heads in attention modules: each rank has its part of them."""
HEAD_SIZES = ("head_dim", "head_width", "head_size", "d_head")
"""Attributes that hold the features of one head."""


@dataclass
class Plan:
    """What is to be done with the modules of a model, by their names.

    Attributes:
        layers: The word for each module that is named.
        attributes: Further attributes of modules that count features of all heads, to be divided by the ranks.
        notes: What was left unsplit, and why.
    """

    layers: dict[str, list[str]] = field(default_factory=dict)
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, word: str) -> None:
        """One more word for a module."""
        words = self.layers.setdefault(name, [])
        if word not in words:
            words.append(word)

    def named(self, word: str) -> list[str]:
        """The modules with this word."""
        return [name for name, words in self.layers.items() if word in words]


def from_patterns(module: nn.Module, patterns: Mapping[str, str], left: Container[int] = ()) -> Plan:
    """The plan that patterns of module names give; of several patterns that match, the last counts.

    Modules whose `id` is in `left` are passed over.

    Raises:
        ConfigError: A pattern matches nothing, or its word is not known.
    """
    plan = Plan()
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    for pattern, word in patterns.items():
        where = f"plan, {pattern!r}"
        known = word in WORDS or (word.startswith("packed:") and _proportions(word) is not None)
        if not known:
            raise ConfigError(
                f"{word!r} is no way to split a layer",
                where=where,
                fix=did_you_mean(word, WORDS) or f"one of {', '.join(WORDS)}",
            )
        found = [name for name in names if fnmatchcase(name, pattern)]
        if not found:
            close = _pattern_that_matches(pattern, names)
            raise ConfigError(
                f"the pattern {pattern!r} matches no module of {type(module).__name__}",
                where=where,
                why=f"its modules are {_some([name for name in names if name])}",
                fix=f"did you mean {close!r}?"
                if close
                else "name modules as `named_modules()` does; * stands for any part",
            )
        for name in found:
            if id(module.get_submodule(name)) not in left:
                plan.layers[name] = [word]
    return plan


def _pattern_that_matches(pattern: str, names: list[str]) -> str | None:
    """The pattern that was meant, if its words are near to those of modules."""
    close = near_pattern(pattern, {word for name in names for word in name.split(".")})
    if close is not None and any(fnmatchcase(name, close) for name in names):
        return close
    return did_you_mean(pattern, names)


def check(module: nn.Module, plan: Mapping[str, str] | str, left: Container[int] = ()) -> None:
    """Raises what `parallelize_tensor` would of a full model whose parts are split one by one."""
    automatic(module, 1, False, left) if isinstance(plan, str) else from_patterns(module, plan, left)


def for_part(part: nn.Module, plan: Mapping[str, str] | str, left: Container[int] = ()) -> Mapping[str, str] | str:
    """The plan as far as a part of the model has its layers: other parts may have the others."""
    if isinstance(plan, str):
        modules = [module for module in part.modules() if id(module) not in left]
        return plan if any(known.matches(module) for module in modules for known in _BLOCKS) else {}
    names = [name for name, _ in part.named_modules(remove_duplicate=False)]
    return {pattern: word for pattern, word in plan.items() if any(fnmatchcase(name, pattern) for name in names)}


def _proportions(word: str) -> tuple[int, ...] | None:
    parts = word.removeprefix("packed:").split(",")
    return tuple(map(int, parts)) if all(part.isdecimal() and int(part) for part in parts) else None


def packed(words: list[str]) -> tuple[int, ...]:
    """The proportions of a packed layer, or nothing."""
    return next((_proportions(word) or () for word in words if word.startswith("packed:")), ())


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


@dataclass(frozen=True)
class _Known:
    """Children by which a block is known, and how they are split."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    packed: str = ""
    summed: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    @property
    def attention(self) -> bool:
        return bool(self.packed) or len(self.columns) == 3

    def matches(self, module: nn.Module) -> bool:
        return all(is_linear(getattr(module, name, None)) for name in (*self.columns, *self.rows))


_QK_NORMS = ("q_norm", "k_norm")
_BLOCKS = (
    _Known("an attention", ("q_proj", "k_proj", "v_proj"), ("o_proj",), summed=_QK_NORMS),
    _Known("an attention", ("q_proj", "k_proj", "v_proj"), ("out_proj",), summed=_QK_NORMS),
    _Known("an attention", ("wq", "wk", "wv"), ("wo",), summed=_QK_NORMS),
    _Known("the attention of GPT-2", ("c_attn",), ("c_proj",), packed="packed:1,1,1", attributes=("split_size",)),
    _Known("an attention", ("qkv",), ("out",), packed="packed:1,1,1", summed=_QK_NORMS),
    _Known("a gated MLP", ("gate_proj", "up_proj"), ("down_proj",)),
    _Known("a gated MLP", ("w1", "w3"), ("w2",)),
    _Known("a gated MLP", ("gate", "up"), ("down",)),
    _Known("an MLP", ("c_fc",), ("c_proj",)),
    _Known("an MLP", ("fc1",), ("fc2",)),
    _Known("an MLP", ("linear1",), ("linear2",)),
    _Known("an MLP", ("up",), ("down",)),
)


def is_linear(module: object) -> bool:
    """Whether it is a linear layer that can be split: `nn.Linear`, or transformers' `Conv1D`."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: object) -> bool:
    """Whether it is transformers' `Conv1D`, a linear layer whose weight is (in, out)."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2


def is_norm(module: nn.Module) -> bool:
    """Whether it normalises, by its class's name."""
    return type(module).__name__.lower().endswith(("norm", "layernorm", "rmsnorm"))


def automatic(module: nn.Module, ranks: int, sequence: bool, left: Container[int] = ()) -> Plan:
    """The plan of the blocks that are known, wherever they are in the model; those whose `id` is in `left` are not.

    Raises:
        ConfigError: No block is known, or one has layers of which it is not known what they work on.
    """
    plan = Plan()
    for name, block in module.named_modules():
        if id(block) in left:
            continue
        if isinstance(block, nn.MultiheadAttention):
            why = "its code fixes the number of heads and the width to those of the full layer"
            plan.notes.append(f"{name or 'the model'} (torch.nn.MultiheadAttention) stays unsplit: {why}")
        known = next((one for one in _BLOCKS if one.matches(block)), None)
        if known is not None:
            _add(plan, name, block, known)
    if not plan.layers:
        raise ConfigError(
            f"no block of {type(module).__name__} is known, so there is no plan for it",
            where="plan: auto",
            why=f"known are layers named {'; '.join(', '.join((*b.columns, *b.rows)) for b in _BLOCKS)}; its linear "
            f"layers are {_linear_layers(module, left) or 'none'}",
            fix="write the plan, with `colwise` for the layers that widen and `rowwise` for those behind them: "
            'plan: {"blocks.*.mlp.up": colwise, "blocks.*.mlp.down": rowwise}',
        )
    _add_vocabulary(plan, module, ranks)
    if sequence:
        _add_sequence(plan, module)
    return plan


def _linear_layers(module: nn.Module, left: Container[int]) -> str:
    """`blocks.*.up (12 -> 24), ...`: once for all blocks of a list."""
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and id(layer) not in left:
            pattern = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            found.setdefault(pattern, f"{pattern} ({layer.in_features} -> {layer.out_features})")
    return _some(list(found.values()))


def _words(block: nn.Module, known: _Known) -> dict[str, str]:
    """The children of a known block, and how they are split."""
    summed = [child for child in known.summed if getattr(block, child, None) is not None]
    return {
        **dict.fromkeys(known.columns, known.packed or "colwise"),
        **dict.fromkeys(known.rows, "rowwise"),
        **dict.fromkeys(summed, "summed"),
    }


def _written(name: str, block: nn.Module, known: _Known) -> str:
    """The plan of a known block in YAML, for all blocks of its list."""
    pattern = ".".join("*" if part.isdecimal() else part for part in name.split(".") if part)
    return "plan: {" + ", ".join(f'"{_join(pattern, n)}": {word}' for n, word in _words(block, known).items()) + "}"


def _add(plan: Plan, name: str, block: nn.Module, known: _Known) -> None:
    used = {*known.columns, *known.rows, *known.summed}
    strange = [child for child, _ in block._parameters.items() if block._parameters[child] is not None]
    for child, layer in block.named_children():
        if child in used or not any(True for _ in layer.parameters()):
            continue
        inside = any(one.matches(sub) for sub in layer.modules() for one in _BLOCKS)
        beside = not known.attention and (is_norm(layer) or isinstance(layer, nn.MultiheadAttention))
        if not (inside or beside):
            strange.append(child)
    if strange:
        split = ", ".join((*known.columns, *known.rows))
        raise ConfigError(
            f"it is not known how {strange[0]!r} works on a part of the features",
            where=f"plan: auto, {name or 'the model'} ({type(block).__name__})",
            why=f"{type(block).__name__} has {split}, as {known.title} has, and {strange[0]!r} beside them: a layer "
            f"between {', '.join(known.columns)} and {', '.join(known.rows)} would see one rank's features only",
            fix=f"write the plan, where no other layer lies between them: {_written(name, block, known)}; what it does "
            "not name stays unsplit",
        )
    for child, word in _words(block, known).items():
        plan.add(_join(name, child), word)
    if known.attributes:
        plan.attributes[name] = known.attributes


def _add_vocabulary(plan: Plan, module: nn.Module, ranks: int) -> None:
    """Splits the vocabulary where the head is a separate layer: code that multiplies by a weight needs all of it."""
    tables = {n: m for n, m in module.named_modules() if type(m) is nn.Embedding}
    for name, head in module.named_modules():
        if name.rpartition(".")[2] not in ("lm_head", "head", "output") or type(head) is not nn.Linear:
            continue
        inputs = {n: m for n, m in tables.items() if m.weight.shape == head.weight.shape}
        if not inputs:
            continue
        size = head.out_features
        if size % ranks:
            plan.notes.append(f"{name} stays unsplit: its vocabulary of {size} cannot be divided among {ranks} ranks")
            continue
        for one in (name, *inputs):
            plan.add(one, "vocab")


def _add_sequence(plan: Plan, module: nn.Module) -> None:
    """Norms and the edges of the part of the model that works on a split sequence."""
    stacks = [
        (name, stack)
        for name, stack in module.named_modules()
        if isinstance(stack, nn.ModuleList) and any(n.startswith(f"{name}.") for n in plan.layers)
    ]
    # An outer list only: experts and the like are lists inside a block.
    stacks = [(n, s) for n, s in stacks if not any(n.startswith(f"{other}.") for other, _ in stacks)]
    if len(stacks) != 1:
        raise ConfigError(
            f"it is not known where the sequence is to be split: there are {len(stacks)} lists of blocks",
            where="plan: auto, sequence_parallel",
            fix="write the plan, with `sequence_begin` for the first block and `sequence_end` for the last norm",
        )
    name, stack = stacks[0]
    parent = name.rpartition(".")[0]
    last = [n for n, m in module.get_submodule(parent).named_children() if is_norm(m)]
    if len(last) != 1:
        raise ConfigError(
            f"it is not known where the sequence is to be gathered: beside {name} there are {len(last)} norms",
            where="plan: auto, sequence_parallel",
            fix="write the plan, with `sequence_begin` for the first block and `sequence_end` for the last norm",
        )
    for index, block in stack.named_children():
        for child, layer in block.named_children():
            full = _join(_join(name, index), child)
            if is_norm(layer):
                plan.add(full, "sequence")
            elif _is_attention(layer):
                plan.add(full, "sequence_gather")
            elif any(True for _ in layer.parameters()) and not any(n.startswith(full) for n in plan.layers):
                raise ConfigError(
                    f"it is not known how {full!r} works on a part of the sequence",
                    where="plan: auto, sequence_parallel",
                    fix="write the plan, with `sequence` if it works on each token alone",
                )
    plan.add(f"{name}.{next(iter(dict(stack.named_children())))}", "sequence_begin")
    plan.add(_join(parent, last[0]), "sequence_end")


def _is_attention(module: nn.Module) -> bool:
    return any(one.attention and one.matches(module) for one in _BLOCKS)


def _join(*names: str) -> str:
    return ".".join(name for name in names if name)


def parent_names(names: list[str]) -> Iterator[str]:
    """The modules that contain these, once each."""
    yield from dict.fromkeys(name.rpartition(".")[0] for name in names)
