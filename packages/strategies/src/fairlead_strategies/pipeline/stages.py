"""A LightningModule cut into stages: each rank keeps its layers, under the names of the full model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fairlead.errors import ConfigError
from fairlead_distributed.parallel.pipeline.between_stages import Tied, groups_of, shared_by_stages


class Elsewhere(nn.Module):
    """Stands where a layer of another stage was: it has no parameters, and cannot be called."""

    def __init__(self, name: str, rank: int) -> None:
        super().__init__()
        self.location = f"{name} is on pipeline rank {rank}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises."""
        raise ConfigError(
            f"{self.location}, and was called here",
            where="trainer.strategy",
            fix="call the module itself, on all ranks together: self(...) goes through all stages",
        )

    def extra_repr(self) -> str:
        """Where it is."""
        return self.location


class StageOfModule(nn.Module):
    """The layers of one stage, in a tree of the same names as in the full model.

    Plans that name layers (`blocks.*.up`) fit it as they fit the full model, and units to shard are found in it.
    """

    def __init__(self, full: nn.Module, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        keep = {id(part) for layer in layers for part in layer.modules()}
        for name, child in full.named_children():
            pruned = _pruned(child, keep)
            if pruned is not None:
                self.add_module(name, pruned)
        object.__setattr__(self, "chain", list(layers))  # not modules of it once more

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the last layer returns; a tuple gives its parts to the next layer."""
        out: Any = inputs
        for layer in vars(self)["chain"]:
            out = layer(*out, **kwargs) if isinstance(out, tuple) else layer(out, **kwargs)
            kwargs = {}
        return out


def _pruned(module: nn.Module, keep: set[int]) -> nn.Module | None:
    if id(module) in keep:
        return module
    children = {name: _pruned(child, keep) for name, child in module.named_children()}
    found = {name: child for name, child in children.items() if child is not None}
    if not found:
        return None
    container = nn.ModuleList() if isinstance(module, nn.ModuleList) else nn.Module()
    for name, child in found.items():
        container.add_module(name, child)
    return container


@dataclass
class Names:
    """The names of the full model, which a rank still knows when it has only some of the layers."""

    state: list[str]
    """Keys of the `state_dict` of the full model, in its order."""
    canonical: dict[str, str]
    """The first name of each parameter, by each of its names: tied weights have several."""
    parameters: list[str]
    """First names of all parameters, in their order."""

    @classmethod
    def of(cls, module: nn.Module) -> Names:
        """Those of a module with all layers."""
        first: dict[int, str] = {}
        canonical = {
            name: first.setdefault(id(one), name) for name, one in module.named_parameters(remove_duplicate=False)
        }
        return cls(list(module.state_dict()), canonical, list(dict.fromkeys(canonical.values())))


@dataclass
class Split:
    """What became of a module on this rank."""

    names: Names
    stages: list[nn.Module]
    tied: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """The first name of each weight that other ranks hold too, and the pipeline ranks that do."""
    described: list[str] = field(default_factory=list)
    """One line for each stage of the full pipeline."""
    elsewhere: list[tuple[nn.Module, str, nn.Module, nn.Module]] = field(default_factory=list)
    """What is on other ranks: where it was (a module and a name in it), the layer without its values, the stand-in."""

    def parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """This rank's parameters by the first name that they have in the full model."""
        found: dict[str, nn.Parameter] = {}
        for name, one in module.named_parameters():
            found.setdefault(self.names.canonical[name], one)
        return found

    @contextmanager
    def with_all_layers(self, module: nn.Module) -> Iterator[dict[int, str]]:
        """Inside the block the module has all layers, those of other ranks without memory for their values.

        Gives the first name of each parameter by its `id`: for `configure_optimizers`, which may want any of them.
        """
        for parent, name, layer, _ in self.elsewhere:
            setattr(parent, name, layer)
        try:
            yield {id(one): self.names.canonical[name] for name, one in module.named_parameters()}
        finally:
            for parent, name, _, stand_in in self.elsewhere:
                setattr(parent, name, stand_in)

    def tied_here(self, module: nn.Module, rank: int, group: dist.ProcessGroup | None) -> list[Tied]:
        """The weights that other ranks hold too, with a group for each; a collective of all ranks of the run."""
        mine = self.parameters(module)
        groups = groups_of({ranks for _, ranks in self.tied}, group)
        return [
            Tied(mine[name], ranks, groups[ranks], counted=ranks[0] == rank)
            for name, ranks in self.tied
            if rank in ranks
        ]


def split_module(
    module: nn.Module,
    layers: Sequence[nn.Module],
    names: Sequence[str],
    parts: Sequence[range],
    owners: Sequence[int],
    rank: int,
) -> Split:
    """Leaves the layers of this rank's stages in the module; those of others become `Elsewhere`.

    Args:
        module: The full model; changed in place.
        layers: Its layers in their order.
        names: What they are called.
        parts: For each stage of the pipeline, its layers.
        owners: For each stage, its rank of the pipeline.
        rank: This rank of the pipeline.
    """
    chains = [[layers[number] for number in part] for part in parts]
    known = Names.of(module)
    first = {id(one): known.canonical[name] for name, one in module.named_parameters()}
    tied = [(first[key], ranks) for key, ranks in shared_by_stages(chains, owners).items()]
    stages = [StageOfModule(module, chain) for chain, owner in zip(chains, owners, strict=True) if owner == rank]
    sizes = [sum(p.numel() for p in {id(p): p for one in chain for p in one.parameters()}.values()) for chain in chains]
    described = [
        f"stage {stage} (rank {owners[stage]}): {names[part[0]]}"
        + (f" to {names[part[-1]]}" if len(part) > 1 else "")
        + f", {len(part)} {'layer' if len(part) == 1 else 'layers'}, {sizes[stage]:,} parameters"
        for stage, part in enumerate(parts)
    ]
    mine = {id(part) for chain, owner in zip(chains, owners, strict=True) if owner == rank for part in _within(chain)}
    others = {
        id(part): owner for chain, owner in zip(chains, owners, strict=True) if owner != rank for part in _within(chain)
    }
    tied.sort(key=lambda one: known.parameters.index(one[0]))
    split = Split(known, list(stages), tied, described, list(_elsewhere(module, mine, others, "")))
    for parent, name, layer, stand_in in split.elsewhere:
        _empty(layer, mine)
        setattr(parent, name, stand_in)
    return split


def _within(chain: Iterable[nn.Module]) -> Iterable[nn.Module]:
    return (part for layer in chain for part in layer.modules())


def _elsewhere(
    module: nn.Module, mine: set[int], others: dict[int, int], path: str
) -> Iterator[tuple[nn.Module, str, nn.Module, nn.Module]]:
    for name, child in list(module.named_children()):
        if id(child) in mine:
            continue
        if id(child) in others:
            yield module, name, child, Elsewhere(f"{path}{name}", others[id(child)])
        else:
            yield from _elsewhere(child, mine, others, f"{path}{name}.")


def _empty(layer: nn.Module, mine: set[int]) -> None:
    """Gives the memory of a layer's values back; shapes and number formats stay."""
    for part in layer.modules():
        if id(part) in mine:
            continue
        for name, one in part._parameters.items():
            if one is not None:
                hollow = torch.zeros((), dtype=one.dtype, device=one.device).expand(one.shape)
                part._parameters[name] = nn.Parameter(hollow, one.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros((), dtype=buffer.dtype, device=buffer.device).expand(buffer.shape)
