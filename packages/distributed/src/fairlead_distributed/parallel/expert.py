"""Expert parallelism: each rank has some of the experts of a mixture, and tokens are sent to theirs.

A module is recognised by its parts: `router` (or `gate`), a linear layer with one output for each expert; `experts`, a
`ModuleList`; `top_k` (or `num_experts_per_tok`), a number. Its forward is to be: the softmax of the router's outputs,
the `top_k` largest of them, made to add up to one or not, and the sum of those experts' outputs with these weights.
It is called once with random tokens and compared with that, so what computes something else is refused.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fairlead.errors import ConfigError
from fairlead_distributed.parallel._comm import (
    all_to_all,
    exchanged,
    gather_for_all,
    part,
    scale_gradient,
    split_for_parts,
)
from fairlead_distributed.parallel._layers import check_divisible
from fairlead_distributed.parallel._local import derived
from fairlead_distributed.rng import isolated_rng

__all__ = ["AbsentExpert", "ExpertParallel", "full_experts", "parallelize_experts"]

ROUTERS = ("router", "gate")
CHOSEN = ("top_k", "num_experts_per_tok")


@dataclass
class ExpertParallel:
    """What was done to a model.

    Attributes:
        layers: For each mixture, by its name, the numbers of the experts that this rank has.
        parameters: Names of this rank's experts' parameters. The other ranks have others: they are not to be averaged
            or sharded over the mesh, and their gradients' squares are to be added over it for a norm.
    """

    layers: dict[str, range] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)


class AbsentExpert(nn.Module):
    """Stands for an expert that another rank has. Its weights in a state dict are passed over.

    Args:
        expert: What it stands for.
        rank: The rank of the mesh that has it.
    """

    def __init__(self, expert: nn.Module, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.tensors = {name: x.detach().to("meta") for name, x in expert.state_dict().items()}

    def forward(self, x: Tensor) -> Tensor:
        """Refuses: the mixture around it sends tokens to the rank that has the expert."""
        raise ConfigError(
            f"this expert is on rank {self.rank} of the mesh",
            fix="call the mixture that it is part of, not the expert",
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        """Takes nothing, and finds nothing missing or unexpected."""

    def extra_repr(self) -> str:
        """Where the expert is."""
        return f"on rank {self.rank}"


def parallelize_experts(module: nn.Module, mesh: DeviceMesh, same: DeviceMesh | None = None) -> ExpertParallel:
    """Divides the experts of each mixture in a model among the ranks of a mesh, in place.

    Each rank calls the model with different tokens. All tokens are computed: there is no capacity, and none is
    dropped. The gradients of the experts are those of the *mean* of the ranks' losses; those of all other parameters
    are to be averaged over the mesh, as `DistributedDataParallel` and `fully_shard` do it. The ranks start with the
    first one's weights. Make optimizers afterwards.

    Args:
        module: A model with mixtures, or one.
        mesh: The ranks, in one dimension.
        same: Ranks that call the model with the same tokens (tensor parallelism), if there are any: each sends its
            part of them. Experts' gradients are then to be averaged over these ranks as well; all other parameters
            have the same gradient on each of them.

    Raises:
        ConfigError: There is no mixture, the ranks cannot share the experts evenly, or a mixture computes something
            else than its parts say.

    Example:
        >>> report = parallelize_experts(model, mesh["expert"])  # doctest: +SKIP
        >>> fully_shard(model, ignored_params={p for n, p in ... if n in report.parameters})  # doctest: +SKIP
    """
    if mesh.ndim != 1:
        raise ConfigError(
            f"a mesh of {mesh.ndim} dimensions {mesh.mesh_dim_names}",
            why="expert parallelism takes one of them",
            fix='pass one dimension: mesh["expert"]',
        )
    found = mixtures_of(module)
    ranks, rank, report = mesh.size(), mesh.get_local_rank(), ExpertParallel()
    for name, mixture in found:
        where = f"{name or 'the model'} ({type(mixture).__name__})"
        _check_parts(mixture, where)
        experts: Any = mixture.experts
        check_divisible(len(experts), ranks, "experts", where)
        mixture.__dict__["_normalised"] = _check_forward(mixture, where)
    for name, mixture in found:
        experts = mixture.experts
        each = len(experts) // ranks
        report.layers[name] = range(rank * each, (rank + 1) * each)
        if ranks > 1:
            _divide(mixture, mesh, report.layers[name])
            mixture.__dict__["_same_tokens"] = same
        prefix = f"{name}.experts" if name else "experts"
        own = [f"{prefix}.{number}." for number in report.layers[name]]
        report.parameters += [n for n, _ in module.named_parameters() if n.startswith(tuple(own))]
    return report


def mixtures_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """What looks like a mixture in a model, by name.

    Raises:
        ConfigError: There is none.
    """
    found = [(name, x) for name, x in module.named_modules() if isinstance(getattr(x, "experts", None), nn.Module)]
    if not found:
        raise ConfigError(
            f"{type(module).__name__} has no mixture of experts",
            why="it would be a module with `experts` (a ModuleList), `router` or `gate` (a Linear), and `top_k`",
            fix="name its parts so, or leave expert parallelism out",
        )
    return found


def full_experts(module: nn.Module) -> dict[str, Tensor]:
    """All experts' weights under the names of the undivided model, on every rank. Call it on all of them.

    Example:
        >>> state = {**model.state_dict(), **full_experts(model)}  # doctest: +SKIP
    """
    full: dict[str, Tensor] = {}
    for name, mixture in module.named_modules():
        mesh: DeviceMesh | None = mixture.__dict__.get("_expert_mesh")
        if mesh is None:
            continue
        experts: Any = mixture.experts
        each = len(experts) // mesh.size()
        for number, expert in enumerate(experts):
            absent = isinstance(expert, AbsentExpert)
            tensors = expert.tensors if absent else expert.state_dict()
            for key, x in tensors.items():
                changed = torch.empty_like(x, device=mesh.device_type) if absent else x.detach().clone()
                dist.broadcast(changed, group=mesh.get_group(), group_src=number // each)
                full[".".join(part for part in (name, "experts", str(number), key) if part)] = changed
    return full


def _part(mixture: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(mixture, name, None) is not None), None)


def _check_parts(mixture: nn.Module, where: str) -> None:
    experts, router, chosen = mixture.experts, _part(mixture, ROUTERS), _part(mixture, CHOSEN)
    count = len(experts) if isinstance(experts, nn.ModuleList) else 0
    layer = getattr(mixture, router) if router else None
    top = getattr(mixture, chosen) if chosen else None
    if not count or not isinstance(layer, nn.Linear) or layer.out_features != count or type(top) is not int:
        raise ConfigError(
            "a mixture of experts of a form that is not known",
            where=where,
            why=f"it has experts: {type(experts).__name__}, {router or 'router'}: {layer}, {chosen or 'top_k'}: {top}",
            fix="give it `experts` (a ModuleList), `router` (a Linear with one output for each) and `top_k`; or leave "
            "expert parallelism out",
        )
    others = [n for n, child in mixture.named_children() if n not in ("experts", router) and len([*child.parameters()])]
    others += [n for n, p in mixture._parameters.items() if p is not None]
    if others:
        raise ConfigError(
            f"it is not known what the mixture does with {others[0]!r}",
            where=where,
            fix="put shared experts and the like beside the mixture, in the module that calls it",
        )


def _check_forward(mixture: nn.Module, where: str) -> bool:
    """Whether the chosen weights are made to add up to one; raises where the forward is neither."""
    router = _router(mixture)
    if router.weight.is_meta:
        raise ConfigError("a mixture without weights cannot be compared", where=where, fix="give it weights first")
    # A copy, as rounding to 16 bits would choose other experts; and what is in evaluation mode stays in it.
    mixture = copy.deepcopy(mixture).eval().to(torch.promote_types(router.weight.dtype, torch.float32))
    router, before = _router(mixture), dict(vars(mixture))
    with torch.no_grad(), isolated_rng(0):
        x = torch.randn(1, 32, router.in_features, dtype=router.weight.dtype).to(router.weight.device)
        out = mixture(x)
        expected = [_full(mixture, x, normalised) for normalised in (True, False)]
    changed = [n for n, v in vars(mixture).items() if n not in before or before[n] is not v]
    if changed:
        raise ConfigError(
            f"the mixture's forward sets {changed[0]!r}, which nothing would set any more",
            where=where,
            fix="compute it outside of the mixture, from the router's outputs",
        )
    if isinstance(out, Tensor) and out.shape == x.shape:
        scale = float(expected[0].abs().max()) or 1.0
        fits = [float((out - one).abs().max()) < 1e-3 * scale for one in expected]
        if any(fits):
            return fits[0]
    raise ConfigError(
        "the mixture does not compute what its parts say",
        where=where,
        why="for random tokens, its result is not the sum of the top_k experts with the softmax of the router as "
        "weights, neither as they are nor made to add up to one",
        fix="return that sum alone, a tensor like the input; or leave expert parallelism out",
    )


def _router(mixture: nn.Module) -> nn.Linear:
    router: nn.Linear = getattr(mixture, _part(mixture, ROUTERS) or "")
    return router


def _choose(mixture: nn.Module, tokens: Tensor, normalised: bool) -> tuple[Tensor, Tensor]:
    """The weights of the chosen experts, and their numbers: (tokens, top_k) both."""
    probabilities = _router(mixture)(tokens).softmax(-1, dtype=torch.promote_types(tokens.dtype, torch.float32))
    weights, chosen = probabilities.topk(getattr(mixture, _part(mixture, CHOSEN) or ""), dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalised else weights).to(tokens.dtype), chosen


def _full(mixture: nn.Module, x: Tensor, normalised: bool) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    weights, chosen = _choose(mixture, tokens, normalised)
    experts: Any = mixture.experts
    all_outputs = torch.stack([expert(tokens) for expert in experts], 1)
    picked = all_outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
    return (picked * weights.unsqueeze(-1)).sum(1).view_as(x)


def _divide(mixture: nn.Module, mesh: DeviceMesh, own: range) -> None:
    experts: Any = mixture.experts
    for tensor in (*mixture.parameters(), *mixture.buffers()):
        full = getattr(tensor, "_local_tensor", tensor)  # a router that tensor parallelism has left unsplit
        dist.broadcast(full.detach(), group=mesh.get_group(), group_src=0)
    for number, expert in enumerate(experts):
        if number not in own:
            experts[number] = AbsentExpert(expert, number // len(own))
    experts.__class__ = derived(type(experts), _OwnExperts)
    mixture.__dict__["_expert_mesh"] = mesh
    mixture.__class__ = derived(type(mixture), _DividedMixture)


class _OwnExperts(nn.ModuleList):
    """What the list of experts becomes: it can be called, so that `fully_shard` may gather it as one unit."""

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """The outputs of this rank's experts, each for so many of the rows; all take part, also with none."""
        here = [expert for expert in self if not isinstance(expert, AbsentExpert)]
        return torch.cat([expert(part) for expert, part in zip(here, torch.split(rows, counts), strict=True)])


class _DividedMixture(nn.Module):
    """What a mixture becomes: the same function of its tokens, with experts on all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        # On all ranks of the same tokens: so the router's gradient is complete on each of them.
        weights, chosen = _choose(self, tokens, self.__dict__["_normalised"])
        same: DeviceMesh | None = self.__dict__["_same_tokens"]
        if same is None:
            out = self._sent(tokens, weights, chosen, 1)
        else:
            short = -len(tokens) % same.size()  # to a number of tokens that can be divided
            parts = [split_for_parts(F.pad(one, (0, 0, 0, short)), 0, same.get_group()) for one in (tokens, weights)]
            chosen = part(F.pad(chosen, (0, 0, 0, short)), 0, same.get_group())
            out = self._sent(parts[0], parts[1], chosen, same.size())
            out = gather_for_all(out, 0, same.get_group())[: len(tokens)]
        out = out.view_as(x) if x.ndim != 2 else out
        # A copy: what is done in place to a view drops the hooks of a mixture that `fully_shard` was applied to.
        return out.clone() if out._is_view() else out

    def _sent(self, tokens: Tensor, weights: Tensor, chosen: Tensor, senders: int) -> Tensor:
        """What the chosen experts make of tokens; `senders` ranks each send a part of those of one batch."""
        mesh: DeviceMesh = self.__dict__["_expert_mesh"]
        group, ranks = mesh.get_group(), mesh.size()
        experts: Any = self.experts
        top = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)  # by expert, and so by rank
        counts = chosen.flatten().bincount(minlength=len(experts))
        each = len(experts) // ranks
        arriving = exchanged(counts, [each] * ranks, [each] * ranks, group).view(ranks, each)  # from rank, for expert
        sent, received = counts.view(ranks, each).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all(tokens.index_select(0, order // top), sent, received, group)
        # They come by rank, and within it by expert: put each expert's together.
        owner = torch.arange(each, device=tokens.device).repeat(ranks).repeat_interleave(arriving.flatten())
        by_expert = owner.argsort(stable=True)
        # Gradients of experts are averaged over all ranks that have them. These see the tokens of all `ranks`, whose
        # losses are averaged; but of a batch that several ranks share, each has its part of one sum.
        scale = senders / ranks
        rows = scale_gradient(rows.index_select(0, by_expert), 1 / scale)
        outputs = experts(rows, arriving.sum(0).tolist())
        outputs = scale_gradient(outputs, scale).index_select(0, by_expert.argsort())
        outputs = all_to_all(outputs, received, sent, group) * weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, order // top, outputs.to(tokens.dtype))
