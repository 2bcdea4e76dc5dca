"""Gradients over ranks: accumulate without communication, and clip by the norm of the full model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import any_absent, first_rank, is_dtensor, is_fully_sharded
from fairlead_distributed.data_parallel import wrapped_models
from fairlead_distributed.errors import NonFiniteGradientError
from fairlead_distributed.info import get_world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

_DEPTH = "_fairlead_no_sync_depth"


@contextmanager
def no_sync(module: nn.Module | None = None) -> Iterator[None]:
    """Backward passes inside the block add up gradients on each rank and communicate nothing.

    For DistributedDataParallel and `fully_shard` modules, also inside of a plain module; for anything else it
    does nothing. Without a module it is for all that `fairlead_distributed.DistributedDataParallel` has wrapped. The
    forward pass belongs inside the block too. The next backward pass after the block sends the sum of all. A sharded
    module keeps unsharded gradients meanwhile, which takes the memory of a full copy.

    Raises:
        ConfigError: No module is given, there are several ranks, and none was wrapped so.

    Example:
        >>> model, batches = nn.Linear(2, 1), torch.ones(4, 3, 2)
        >>> with no_sync(model):
        ...     for batch in batches[:-1]:
        ...         model(batch).sum().backward()
        >>> model(batches[-1]).sum().backward()
    """
    modules: Sequence[nn.Module] = [module] if module is not None else wrapped_models()
    if not modules and get_world_size() > 1:
        raise ConfigError(
            "no_sync() knows no model whose gradients are sent",
            where="no_sync()",
            why="fairlead_distributed.DistributedDataParallel has wrapped none in this process",
            fix="give it the model: no_sync(model)",
        )
    with ExitStack() as stack:
        for part in (part for one in modules for part in one.modules()):
            if is_fully_sharded(part):
                stack.enter_context(_fully_shard_no_sync(part))
            elif isinstance(part, DistributedDataParallel):
                stack.enter_context(part.no_sync())
        yield


@contextmanager
def _fully_shard_no_sync(part: FSDPModule) -> Iterator[None]:
    # The setting is write-only; counting keeps a nested block from switching the outer one off.
    depth = getattr(part, _DEPTH, 0)
    setattr(part, _DEPTH, depth + 1)
    part.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        setattr(part, _DEPTH, depth)
        if depth == 0:
            part.set_requires_gradient_sync(True, recurse=False)


def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scales all gradients in place so that their joint norm is at most `max_norm`.

    The gradients count as one vector, g = g * min(1, max_norm / (norm + 1e-6)), as in
    `torch.nn.utils.clip_grad_norm_` (Pascanu et al. 2013). The difference: sharded gradients (DTensors, from
    `fully_shard` or tensor parallelism, on any meshes, mixed with plain ones) count with all their shards, and each
    mesh costs one all-reduce of a number per sharded dimension. Parameters that only some ranks hold, the experts of a
    mixture, count once, which costs one more for all of them together. The norm of 16-bit gradients is summed up in 32
    bits. Every rank of the meshes must call it. A plain gradient is taken to be the same on all ranks, as after DDP:
    the shards of torch's older `FullyShardedDataParallel` need that module's own `clip_grad_norm_`.

    Args:
        parameters: Parameters, or `model.named_parameters()`, which lets an error name the parameter.
        max_norm: The largest norm allowed.
        norm_type: p of the p-norm, above 0; `inf` is the largest absolute value.
        error_if_nonfinite: Raise instead of spreading infinity or NaN. Costs one more all-reduce per mesh
            dimension, and a GPU synchronisation.
        group: The ranks that these parameters are spread over, where some hold none of one; None: all ranks.

    Returns:
        The norm before clipping, shape (), the same on all ranks; 0 if there are no gradients.

    Raises:
        ConfigError: `max_norm` or `norm_type` is not allowed.
        NonFiniteGradientError: With `error_if_nonfinite`, on all ranks; the gradients are as they were.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
        >>> clip_grad_norm(model.named_parameters(), max_norm=1.0)
        tensor(5.)
    """
    if not norm_type > 0:
        raise ConfigError(f"norm_type must be above 0, not {norm_type}", where="clip_grad_norm(norm_type=)")
    if not max_norm >= 0:
        raise ConfigError(f"max_norm must be 0 or larger, not {max_norm}", where="clip_grad_norm(max_norm=)")
    with torch.no_grad():
        named = _named(parameters)
        grads = [(name, one.grad) for name, one in named if one.grad is not None]
        apart = any_absent(one for _, one in named)
        if not grads and not apart:
            return torch.tensor(0.0)
        shards = _group(grads)
        for shard in shards:
            shard.measure(norm_type)
            shard.reduce(norm_type, find_bad=error_if_nonfinite)
        device = (grads[0] if grads else named[0])[1].device
        if apart:
            shards.append(_of_other_ranks(shards, norm_type, device, group))
        powers = torch.stack([shard.power.to(device) for shard in shards])
        total = powers.max() if math.isinf(norm_type) else powers.sum() ** (1.0 / norm_type)
        wide = any(grad.dtype == torch.float64 for _, grad in grads)
        total = total.to(torch.float64 if wide else torch.float32)
        if error_if_nonfinite:
            _raise_if_bad(shards, grads, total)
        coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for shard in (one for one in shards if one.locals):
            torch._foreach_mul_(shard.locals, coefficient.to(shard.locals[0].device))
        return total


@dataclass
class _Shards:
    """The gradients that are cut in the same way: over the same dimensions of the same mesh, on one device."""

    mesh: DeviceMesh | None
    dims: tuple[int, ...]
    locals: list[Tensor] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    norms: Tensor = field(default_factory=lambda: torch.zeros(0))
    power: Tensor = field(default_factory=lambda: torch.tensor(0.0))
    first_bad: int = -1

    def measure(self, p: float) -> None:
        """This rank's sum of |g|^p, or the largest |g| for p = inf."""
        device = self.locals[0].device
        # float64: the square of a norm of 1e20 must not overflow. MPS has none.
        wide = torch.float32 if device.type == "mps" else torch.float64
        full = [one for one in self.locals if one.numel()]
        if not full:
            self.norms = torch.zeros(0, dtype=wide, device=device)
            self.power = torch.zeros((), dtype=wide, device=device)
            return
        self.norms = torch.zeros(len(full), dtype=wide, device=device)
        for dtype in dict.fromkeys(one.dtype for one in full):
            at = [i for i, one in enumerate(full) if one.dtype == dtype]
            # One fused kernel for all of a dtype, as in torch.nn.utils.get_total_norm, but with its own accumulator.
            accurate = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm([full[i] for i in at], p, dtype=accurate)
            self.norms[at] = torch.stack(list(norms)).to(wide)
        self.power = self.norms.max() if math.isinf(p) else (self.norms**p).sum()

    def reduce(self, p: float, *, find_bad: bool) -> None:
        last = 2**62
        bad = torch.tensor(last, dtype=torch.int64, device=self.power.device)
        if find_bad:
            finite = torch.isfinite(self.norms).tolist()
            full = [i for i, one in zip(self.indices, self.locals, strict=True) if one.numel()]
            bad.fill_(next((i for i, ok in zip(full, finite, strict=True) if not ok), last))
        groups = [] if self.mesh is None else [self.mesh.get_group(dim) for dim in self.dims]
        for group in groups:
            if math.isinf(p):
                # MAX drops NaN on some backends: send it as a flag.
                pair = torch.stack([self.power.nan_to_num(nan=0.0, posinf=math.inf), self.power.isnan().to(self.power)])
                dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=group)
                self.power = torch.where(pair[1] > 0, math.nan, pair[0])
            else:
                dist.all_reduce(self.power, group=group)
            if find_bad:
                dist.all_reduce(bad, op=dist.ReduceOp.MIN, group=group)
        self.first_bad = -1 if not find_bad or int(bad) == last else int(bad)


def _named(parameters: Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    given: list[Tensor | tuple[str, Tensor]] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return [one if isinstance(one, tuple) else (f"#{i}", one) for i, one in enumerate(given)]


def _of_other_ranks(shards: list[_Shards], p: float, device: torch.device, group: dist.ProcessGroup | None) -> _Shards:
    """What other ranks of the group hold and this one does not, as one more part; a collective of all of them."""
    size = dist.get_world_size(group)
    partial = [shard for shard in shards if shard.mesh is not None and shard.mesh.size() < size]
    # Each mesh of some ranks is reported by its first rank alone, and skipped by those that counted it already.
    first = [first_rank(shard.mesh) for shard in partial if shard.mesh is not None]
    own = {one if group is None else dist.get_group_rank(group, one) for one in first}
    wide = torch.float32 if device.type == "mps" else torch.float64
    powers = torch.zeros(size, dtype=wide, device=device)
    rank = dist.get_rank(group)
    if rank in own:
        mine = torch.stack([shard.power.to(device) for shard in partial])
        powers[rank] = mine.max() if math.isinf(p) else mine.sum()
    dist.all_reduce(powers, group=group)
    others = powers[[one for one in range(len(powers)) if one not in own]]
    return _Shards(None, (), power=others.max() if math.isinf(p) else others.sum())


def _group(grads: list[tuple[str, Tensor]]) -> list[_Shards]:
    # In the order of the parameters, which is the same on all ranks: so are the collectives then.
    shards: dict[tuple[object, ...], _Shards] = {}
    for index, (_, grad) in enumerate(grads):
        mesh: DeviceMesh | None = None
        dims: tuple[int, ...] = ()
        local = grad
        if is_dtensor(grad):
            if any(placement.is_partial() for placement in grad.placements):
                raise ConfigError(
                    f"the gradient {grads[index][0]} is not reduced yet (a partial sum on each rank)",
                    where="clip_grad_norm",
                    fix="let the backward pass finish its reduction, outside of no_sync, before clipping",
                )
            mesh = grad.device_mesh
            dims = tuple(d for d, placement in enumerate(grad.placements) if not placement.is_replicate())
            local = grad.to_local()
        key = (mesh, dims, local.device)
        one = shards.setdefault(key, _Shards(mesh, dims))
        one.locals.append(local)
        one.indices.append(index)
    return list(shards.values())


def _raise_if_bad(shards: list[_Shards], grads: list[tuple[str, Tensor]], total: Tensor) -> None:
    found = [shard.first_bad for shard in shards if shard.first_bad >= 0]
    if not found and bool(torch.isfinite(total)):
        return
    first = min(found) if found else None
    which = "the norm over all gradients" if first is None else f"the gradient of {grads[first][0]}"
    error = NonFiniteGradientError(
        f"{which} is infinite or NaN",
        where=None if first is None else f"parameter {first + 1} of {len(grads)}, shape {tuple(grads[first][1].shape)}",
        why=f"the norm over all gradients is {float(total)}",
        fix="lower the learning rate or warm it up, use bf16 or 32-bit precision, look at the batch of this step",
    )
    error.parameter = None if first is None else grads[first][0]
    raise error
