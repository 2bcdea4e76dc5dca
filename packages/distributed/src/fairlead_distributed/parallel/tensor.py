"""Tensor parallelism: a model's layers split over ranks by a plan, without a change of its weights or its code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fairlead.errors import ConfigError
from fairlead_distributed.parallel import plans
from fairlead_distributed.parallel._comm import gather_for_all, gather_for_parts, split_for_parts
from fairlead_distributed.parallel._layers import SEQUENCE, Column, Row, VocabularyRows, check_divisible, multiplies
from fairlead_distributed.parallel._local import derived, distribute, first_tensor, read_locally
from fairlead_distributed.parallel.plans import Plan

__all__ = ["TensorParallel", "parallelize_tensor"]


@dataclass
class TensorParallel:
    """What was done to a model.

    Attributes:
        layers: The plan's words for each module that has one.
        attributes: Numbers of heads (and of their features) that were divided: `blocks.0.attention.heads` -> (4, 2).
        notes: What was left unsplit, and why.
        ranks: How many ranks share the layers.
    """

    layers: dict[str, list[str]]
    attributes: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ranks: int = 1


def parallelize_tensor(
    module: nn.Module,
    mesh: DeviceMesh,
    plan: Mapping[str, str] | str,
    *,
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    leave: Iterable[nn.Module] = (),
) -> TensorParallel:
    """Splits a model's layers over the ranks of a mesh, in place. Call it on all of them, before `fully_shard`.

    The model computes what it did, in output and in every gradient; all ranks of the mesh are to get the same batch.
    All parameters become DTensors (the first rank's values count), so make optimizers afterwards. Modules that hold a
    number of heads get their rank's part of it.

    Args:
        module: The model.
        mesh: The ranks, in one dimension.
        plan: For each pattern of module names (`blocks.*.mlp.up`) a word of `plans.WORDS`: `colwise`, `rowwise`,
            `packed:1,1,1`, `vocab`, ...; or "auto" for blocks that are known (Llama, Qwen, GPT-2, torch.nn's
            TransformerEncoderLayer without its attention).
        sequence_parallel: Between the blocks, each rank has a part of the sequence (arXiv:2205.05198). The length of
            the sequence, dimension 1, must be divisible.
        loss_parallel: The head's output stays split, as a DTensor: compute the loss and its gradient inside
            `torch.distributed.tensor.parallel.loss_parallel()`.
        leave: Modules that are left as they are, with all that is in them, whatever the plan says: their parameters
            stay plain tensors (experts that are divided otherwise).

    Raises:
        ConfigError: A pattern matches nothing, a layer cannot be split so, or a size cannot be divided evenly. The
            model is then as it was.

    Example:
        >>> parallelize_tensor(model, mesh["tensor"], {"*.up": "colwise", "*.down": "rowwise"})  # doctest: +SKIP
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}",
            why="tensor parallelism takes one of them",
            fix='pass one dimension: mesh["tensor"]',
        )
    ranks = mesh.size()
    left = frozenset(id(part) for one in leave for part in one.modules())
    if isinstance(plan, str):
        if plan != "auto":
            raise ConfigError(f"{plan!r} is no plan", fix="auto, or a mapping of module names to words")
        resolved = plans.automatic(module, ranks, sequence_parallel, left)
    else:
        resolved = plans.from_patterns(module, plan, left)
    report = TensorParallel(resolved.layers, notes=resolved.notes, ranks=ranks)
    changes = _Checked(module, resolved, ranks, sequence_parallel, loss_parallel).attributes()
    if ranks == 1:
        return report
    for owner, name, value in changes:
        report.attributes[f"{owner}.{name}".lstrip(".")] = (value, value // ranks)
        block = module.get_submodule(owner)
        setattr(block, name, value // ranks)
        block.__class__ = derived(type(block), _PartOfHeads)
    _apply(module, mesh, resolved, sequence_parallel, loss_parallel, left)
    return report


class _PartOfHeads(nn.Module):
    """Attention whose number of heads was divided."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            error.add_note(
                f"{type(self).__name__} has this rank's part of the heads (tensor parallelism). Its code must take the "
                "number of heads from its attributes or leave it open (-1), and the size of a head must be a constant."
            )
            raise


def _in_experts(module: nn.Module, name: str) -> bool:
    """Whether a layer is within the experts of a mixture."""
    parts = name.split(".")
    return any(
        part == "experts" and isinstance(module.get_submodule(".".join(parts[: at + 1])), nn.ModuleList)
        for at, part in enumerate(parts)
    )


class _Checked:
    """A plan that fits a model, or the error that says where it does not."""

    def __init__(self, module: nn.Module, plan: Plan, ranks: int, sequence: bool, loss_parallel: bool) -> None:
        self.module, self.plan, self.ranks = module, plan, ranks
        shared: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor):
                raise ConfigError(
                    f"{name!r} is spread over a mesh already",
                    fix="split a model before `fully_shard`, and once",
                )
            shared.setdefault(id(parameter), []).append(name)
        for name, words in plan.layers.items():
            self._check(name, module.get_submodule(name), words, sequence)
        self._check_tied([names for names in shared.values() if len(names) > 1])
        if sequence and not (plan.named("sequence_begin") and plan.named("sequence_end")):
            raise ConfigError(
                "the plan does not say where the sequence is split and gathered",
                where="plan, sequence_parallel",
                fix="name the first block `sequence_begin` and the last norm `sequence_end`",
            )
        inside = next((n for n in plan.layers if sequence and _in_experts(module, n)), None)
        if inside is not None:
            raise ConfigError(
                f"{inside!r} is an expert's, and sequence_parallel splits the tokens that choose it",
                where="plan, sequence_parallel",
                why="on each rank other tokens choose an expert, and in other numbers: what is gathered does not fit",
                fix="leave sequence_parallel out, or leave experts unsplit: do not name them in the plan",
            )
        heads = [n for n in plan.named("vocab") if plans.is_linear(module.get_submodule(n))]
        if loss_parallel and len(heads) != 1:
            raise ConfigError(
                f"loss_parallel needs one head whose vocabulary is split, and the plan has {len(heads)}",
                where="plan, loss_parallel",
                fix="name the linear layer that makes the logits `vocab`, or leave loss_parallel out",
            )

    def _check(self, name: str, layer: nn.Module, words: list[str], sequence: bool) -> None:
        for word in words:
            kind = word.partition(":")[0]
            where = f"plan, {name or 'the model'}: {word}"
            if kind.startswith("sequence") and not sequence:
                raise ConfigError(f"{word!r} without sequence_parallel", where=where, fix="sequence_parallel=True")
            if kind == "vocab" and isinstance(layer, nn.Embedding):
                self._check_embedding(layer, where)
            elif kind in ("colwise", "rowwise", "packed", "vocab"):
                self._check_linear(layer, kind, plans.packed(words), where)

    def _check_embedding(self, layer: nn.Embedding, where: str) -> None:
        set_ = [n for n in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(layer, n)]
        if set_ or type(layer).forward is not nn.Embedding.forward:
            raise ConfigError(
                f"an embedding with {set_[0] if set_ else 'a custom forward'} cannot be split",
                where=where,
                fix="leave it out of the plan: it is then not split",
            )
        check_divisible(layer.num_embeddings, self.ranks, "tokens of the vocabulary", where)

    def _check_linear(self, layer: nn.Module, kind: str, packed: tuple[int, ...], where: str) -> None:
        if not plans.is_linear(layer) or isinstance(layer, Column | Row):
            raise ConfigError(
                f"{type(layer).__name__} cannot be split: it is no linear layer",
                where=where,
                fix="name torch.nn.Linear or transformers' Conv1D layers, or an Embedding with `vocab`",
            )
        own = isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward
        if own and not multiplies(layer):
            raise ConfigError(
                f"{type(layer).__name__} has a custom forward, which splitting would replace",
                where=where,
                fix="split the model before its layers are replaced (quantised, adapted), or leave this layer out",
            )
        weight = layer.weight
        assert isinstance(weight, Tensor)
        outputs, inputs = weight.shape if isinstance(layer, nn.Linear) else reversed(weight.shape)
        split = inputs if kind == "rowwise" else outputs
        multiple = getattr(layer, "multiple", 1)
        if split % (multiple * self.ranks) and not split % self.ranks:
            raise ConfigError(
                f"{type(layer).__name__} cannot be split: {split} features are {split // self.ranks} on each rank",
                where=where,
                why=f"it computes with multiples of {multiple}",
                fix="leave this layer as it was (trainer.precision.ignore_modules), or out of the plan",
            )
        if kind == "rowwise":
            check_divisible(inputs, self.ranks, "input features", where)
            return
        check_divisible(
            outputs, self.ranks, "tokens of the vocabulary" if kind == "vocab" else "output features", where
        )
        if packed and outputs % sum(packed):
            raise ConfigError(
                f"{outputs} output features are not made of {len(packed)} layers in the proportions {packed}",
                where=where,
                fix="give the proportions of the layers that are packed: `packed:1,1,1` for three of one size",
            )
        for size in packed:
            check_divisible(outputs // sum(packed) * size, self.ranks, "output features of a packed layer", where)

    def _check_tied(self, groups: list[list[str]]) -> None:
        for names in groups:
            words = {n: self.plan.layers.get(n.rpartition(".")[0], []) for n in names}
            kinds = {tuple(w for w in found if w not in ("replicate", "sequence_begin")) for found in words.values()}
            if len(kinds) > 1:
                raise ConfigError(
                    f"{' and '.join(names)} are one parameter, and the plan splits them differently",
                    where="plan",
                    why="; ".join(f"{n}: {', '.join(w) or 'unsplit'}" for n, w in words.items()),
                    fix="give both the same word (`vocab` for an embedding and its head), or leave both out",
                )

    def attributes(self) -> list[tuple[str, str, int]]:
        """Numbers of heads to divide: (module, attribute, value)."""
        found = []
        columns = [n for n, w in self.plan.layers.items() if "colwise" in w or plans.packed(w)]
        rows = {n.rpartition(".")[0] for n in self.plan.named("rowwise")}
        for owner in plans.parent_names(columns):
            block = self.module.get_submodule(owner)
            extra = self.plan.attributes.get(owner, ())
            for name, value in vars(block).items():
                if not (name in plans.HEADS or name in extra) or type(value) is not int or owner not in rows:
                    continue
                what = "heads" if name in plans.HEADS else f"of {name}"
                check_divisible(value, self.ranks, what, f"{owner}.{name}".lstrip("."))
                found.append((owner, name, value))
            size = next((getattr(block, n) for n in plans.HEAD_SIZES if type(getattr(block, n, None)) is int), None)
            for column in (c for c in columns if size and c.rpartition(".")[0] == owner):
                layer: Any = self.module.get_submodule(column)
                outputs = layer.weight.shape[0 if isinstance(layer, nn.Linear) else 1]
                each = plans.packed(self.plan.layers[column]) or (1,)
                for part in each:
                    heads = outputs * part // sum(each) // size
                    check_divisible(heads, self.ranks, f"heads of {size} features", f"plan, {column}")
        return found


def _apply(
    module: nn.Module, mesh: DeviceMesh, plan: Plan, sequence: bool, loss_parallel: bool, left: frozenset[int]
) -> None:
    spread: dict[int, nn.Parameter] = {}
    tied = {n: id(p) for n, p in module.named_parameters(remove_duplicate=False)}
    inside = plan.named("sequence_gather")
    for name, words in plan.layers.items():
        layer: Any = module.get_submodule(name)
        kind = next((w.partition(":")[0] for w in words if w.partition(":")[0] in _BASES), None)
        if kind is None:
            continue
        base = VocabularyRows if isinstance(layer, nn.Embedding) else _BASES[kind]
        own = list(layer._parameters)
        shared = {n: spread[tied[f"{name}.{n}"]] for n in own if tied.get(f"{name}.{n}") in spread}
        layer.__class__ = derived(type(layer), base)
        if base is not VocabularyRows:
            layer.transposed = plans.is_conv1d(layer)
        if base is Column:
            head = kind == "vocab"
            layer.packed = plans.packed(words)
            layer.gather_output, layer.loss_parallel = head and not loss_parallel, head and loss_parallel
            layer.entering = not any(name.startswith(f"{outer}.") for outer in inside)
            layer.sequence = sequence and not head
        elif base is Row:
            layer.sequence = sequence
        layer._parameters.update(shared)
        layer.split(mesh)
        spread.update({tied[f"{name}.{n}"]: layer._parameters[n] for n in own if layer._parameters[n] is not None})
    for name, owner in module.named_modules():
        if id(owner) in left:
            continue
        for key, parameter in owner._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                original = id(parameter)
                if original not in spread:
                    spread[original] = distribute(parameter, mesh, Replicate())
                owner._parameters[key] = spread[original]
        if not isinstance(owner, Column | Row | VocabularyRows):
            words = plan.layers.get(name, [])
            read_locally(owner, summed=bool({"summed", "sequence", "sequence_end"} & set(words)))
        if isinstance(owner, nn.TransformerEncoderLayer):
            # Its fast path for inference reads the layers' weights past their forward.
            owner.activation_relu_or_gelu = 0
    _mark_edges(module, mesh, plan)


_BASES: dict[str, type[Column | Row]] = {"colwise": Column, "packed": Column, "vocab": Column, "rowwise": Row}


def _mark_edges(module: nn.Module, mesh: DeviceMesh, plan: Plan) -> None:
    group = mesh.get_group()

    def entering(move: Any) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            at = first_tensor(args, kwargs)
            if isinstance(at, int):
                return (*args[:at], move(args[at], SEQUENCE, group), *args[at + 1 :]), kwargs
            return args, kwargs if at is None else {**kwargs, at: move(kwargs[at], SEQUENCE, group)}

        return hook

    for name in plan.named("sequence_begin"):
        module.get_submodule(name).register_forward_pre_hook(entering(split_for_parts), with_kwargs=True)
    for name in plan.named("sequence_gather"):
        module.get_submodule(name).register_forward_pre_hook(entering(gather_for_parts), with_kwargs=True)
    for name in plan.named("sequence_end"):
        module.get_submodule(name).register_forward_hook(
            lambda _module, _args, out: gather_for_all(out, SEQUENCE, group)
        )
