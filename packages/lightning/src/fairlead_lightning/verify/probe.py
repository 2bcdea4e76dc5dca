"""Callbacks that take notes of a training: gradients of the first step, the clipping norm, losses, weights at the end.

Both sides of a verification are watched by the same code; what only the ranks of the layout tell is in `LayoutProbe`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import lightning.pytorch as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import any_absent, is_dtensor, local_part, on_all_ranks
from fairlead_distributed.full_state import full_buffers, full_gradients, full_parameters, placements, plain_name
from fairlead_distributed.objects import gather_objects
from fairlead_distributed.rng import cpu_states
from fairlead_lightning import compat
from fairlead_lightning.verify.batches import detached, digest
from fairlead_lightning.verify.neutral import local_batch_norms, local_statistics, without_dropout, without_ends
from fairlead_lightning.verify.numbers import Rates, Tensors, bytes_of, norm, wide
from fairlead_lightning.verify.plan import START, Plan, batches_file, rank_file
from fairlead_lightning.verify.samples import Generators, Reading, read_epochs

_SMALL: Final = 1e-3
"""The limit, as a multiple of the right norm: below what a part of the model has, which is clipped all the same."""


def clipping_norm(trainer: L.Trainer, optimizer: Any, full: dict[str, Tensor]) -> dict[str, Any]:
    """The norm, found by clipping to much less than it should be, and undone; a collective of all ranks.

    Returns:
        `clipped_by`, and `squares`: the sum of squares that this rank holds, by the dimensions of the mesh that it is
        cut over. Nothing where it cannot be seen so.
    """
    if hasattr(trainer.strategy, "clipping_norm"):  # it clips within its step
        return {}
    if not isinstance(optimizer, Optimizer) or not _clips_by_norm(trainer):
        return {}
    squares = sum(float(wide(grad).square().sum()) for grad in full.values())
    limit = _SMALL * math.sqrt(gather_objects(squares)[0])  # the same on all ranks, as a limit is
    if limit == 0:
        return {}
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    local = [local_part(one) for one in gradients]
    before = [one.clone() for one in local]
    # A strategy may clip all that the module has, also what no optimizer gets.
    known = set(map(id, gradients))
    rest = [p.grad for p in trainer.lightning_module.parameters() if p.grad is not None and id(p.grad) not in known]
    beside = [(local_part(one), local_part(one).clone()) for one in rest]
    held: dict[tuple[str, ...], float] = {}
    for gradient, one in zip(gradients, before, strict=True):
        cut = _cut_over(gradient)
        held[cut] = held.get(cut, 0.0) + float(wide(one).square().sum())
    # Also on a rank without gradients, such as a stage that none reach: the others would wait for it.
    trainer.precision_plugin.clip_gradients(optimizer, limit)
    for one, was in beside:
        one.copy_(was)
    own = sum(held.values())
    if own == 0:
        return {"squares": held}
    unclipped = sum(float((wide(one) * wide(was)).sum()) for one, was in zip(local, before, strict=True)) / own
    for one, was in zip(local, before, strict=True):
        one.copy_(was)
    return {"squares": held, "clipped_by": limit / unclipped if unclipped else math.inf}


def own_clipping_norm(trainer: L.Trainer) -> dict[str, Any]:
    """`clipped_by`, of a strategy that clips within its step, and says afterwards by which norm."""
    known: Any = getattr(trainer.strategy, "clipping_norm", None)
    norm = known() if known is not None and _clips_by_norm(trainer) else None
    return {"clipped_by": float(norm)} if norm is not None else {}


def _clips_by_norm(trainer: L.Trainer) -> bool:
    algorithm = str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower()
    return bool(trainer.gradient_clip_val) and len(trainer.optimizers) == 1 and algorithm == "norm"


def _cut_over(tensor: Tensor) -> tuple[str, ...]:
    """The dimensions of the mesh whose ranks have a part of it each."""
    if not is_dtensor(tensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names or ()
    return tuple(name for name, how in zip(names, tensor.placements, strict=True) if not how.is_replicate())


def optimizer_state(trainer: L.Trainer, module: L.LightningModule) -> Tensors | None:
    """`exp_avg of head.weight` and the rest, as copies on the CPU; a collective of all ranks.

    Returns:
        None where the strategy cannot tell it.
    """
    optimizers = [getattr(one, "optimizer", one) for one in trainer.optimizers]
    strategy: Any = trainer.strategy
    if hasattr(strategy, "full_optimizer_state"):  # of DeepSpeed's flat parts
        held = [strategy.full_optimizer_state(one) for one in optimizers]
        if any(one is None for one in held):
            return None
        return {
            f"{key} of {name}": value.detach().to("cpu", copy=True)
            for one in held
            for name, state in one.items()
            for key, value in state.items()
        }
    if not all(isinstance(one, Optimizer) for one in optimizers):
        return None
    if hasattr(strategy, "own_parameters"):  # stages, each of which some ranks hold
        found = _states(dict(strategy.own_parameters()), optimizers, strategy.stage_group, alone=False)
        together: Tensors = {}
        for one in reversed(gather_objects(found)):
            together.update(one)
        return {**together, **found}
    if hasattr(strategy, "full_parameters"):
        return None
    named = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    return _states(named, optimizers, None, alone=trainer.world_size == 1)


@torch.no_grad()
def _states(named: dict[str, Any], optimizers: list[Any], stage: dist.ProcessGroup | None, *, alone: bool) -> Tensors:
    own: dict[tuple[str, str], Tensor] = {}
    for name, parameter in named.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    own[name, key] = value.detach()
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    own[name, key] = torch.tensor(float(value))
    # A rank whose optimizer misses a sharded parameter takes part all the same: the others would wait for its shard.
    split = {key: is_dtensor(value) for key, value in own.items()}
    apart = any_absent(named.values())
    every = [split] if alone and not apart else gather_objects(split, stage)
    keys = {key: together for rank in reversed(every) for key, together in rank.items()}
    found: Tensors = {}
    for (name, key), together in keys.items():
        if name not in named:
            continue  # of another stage
        value = own.get((name, key))
        if apart and not together and is_dtensor(named[name]):
            continue  # a count of steps, which ranks without this expert have not made
        if value is None and together:
            value = torch.zeros_like(named[name].detach())
        if value is None:
            continue
        full = on_all_ranks(value, stage) if apart else _full(value)
        found[f"{key} of {name}"] = full.to("cpu", copy=True)
    return found


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return full


def rates(optimizer: Any) -> list[float]:
    """The learning rate of each group."""
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


@dataclass
class Trained:
    """What a training did to the model: full tensors by the names of the unsplit model.

    Attributes:
        gradients: Those of the first step of each optimizer: complete, behind all hooks, and not clipped.
        applied: The same gradients as the optimizer gets them; in one process without those that it does not have.
        losses: Of each batch; of a reference of each step.
        first: The weights after the first step.
        weights: Those at the end.
        buffers: Those at the end.
        state: What the optimizers hold at the end; None where they do not tell.
        rates: The learning rates of each step.
    """

    gradients: Tensors = field(default_factory=dict)
    applied: Tensors = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    first: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    state: Tensors | None = None
    rates: Rates = field(default_factory=list)

    @property
    def norm(self) -> float:
        """The norm of the first step's gradients that optimizers have, before clipping."""
        every = [one for name, one in self.gradients.items() if not self.applied or name in self.applied]
        return math.sqrt(sum(norm(one) ** 2 for one in every))


class Probe(L.Callback):
    """Notes what a training does to the model.

    Attributes:
        seen: What it has noted.
        dropouts: How many rates of dropout were set to 0.
    """

    def __init__(self) -> None:
        self.seen = Trained()
        self.dropouts = 0
        self._optimizers: list[Any] = []
        self._stepped: list[Any] = []
        self._handles: list[Any] = []
        self._began = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """What comes behind the last step would only take time."""
        without_ends(vars(trainer)["callbacks"])

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """The first batch: everything is built, wrapped and where it is to be."""
        if not self._began:
            self._began = True
            self.dropouts = without_dropout(pl_module)
            self.begin(trainer, pl_module)
            self._watch_steps(trainer, pl_module)

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The training begins with this batch."""

    def _watch_steps(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """The module's own hook is the last that may change gradients before they are clipped."""
        hook = module.on_before_optimizer_step

        @functools.wraps(hook)
        def hooked(optimizer: Any) -> None:
            hook(optimizer)
            self._complete(trainer, module, optimizer)

        vars(module)["on_before_optimizer_step"] = hooked
        for one in trainer.optimizers:
            plain = getattr(one, "optimizer", one)
            if isinstance(plain, Optimizer):
                step = functools.partial(self._before_step, trainer, module)
                self._handles.append(plain.register_step_pre_hook(step))

    def _before_step(
        self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any, args: Any, kwargs: Any
    ) -> Any:
        """Lightning computes gradients within the step, in a closure: what it leaves is what the optimizer gets."""
        given = [*args[1:], *(value for name, value in kwargs.items() if name == "closure")]  # behind the optimizer
        closure = next((one for one in given if callable(one)), None)
        if closure is None:
            self._applied(trainer, module, optimizer)
            return None

        def noted() -> Any:
            result = closure()
            self._applied(trainer, module, optimizer)
            return result

        new = [noted if one is closure else one for one in args]
        return tuple(new), {name: noted if one is closure else one for name, one in kwargs.items()}

    def _complete(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        """The first step of each optimizer: its gradients are complete, and not clipped yet."""
        plain = getattr(optimizer, "optimizer", optimizer)
        if any(plain is one for one in self._optimizers):
            return
        self._optimizers.append(plain)
        self.seen.gradients.update(_gradients_of(trainer, module, plain))
        self.first_step(trainer, plain)

    def _applied(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        """A step is about to be made."""
        if _clips_within_step(trainer.strategy):
            self.seen.rates.append(rates(optimizer))
            return
        self._complete(trainer, module, optimizer)  # a manual step that Lightning does not see
        self.seen.rates.append(rates(optimizer))
        if not any(optimizer is one for one in self._stepped):
            self._stepped.append(optimizer)
            found = _gradients_of(trainer, module, optimizer)
            # Flat parameters of a layout have other names; one process knows which it has.
            self.seen.applied.update(_of_optimizer(found, module, optimizer) if trainer.world_size == 1 else found)

    def first_step(self, trainer: L.Trainer, optimizer: Any) -> None:
        """The first step of an optimizer is about to be made."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        """What `training_step` has returned, divided by the batches of a step where gradients are accumulated."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.seen.losses.append(float(loss.detach()) if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan)
        if self._optimizers and not self.seen.first:
            self.seen.first = _full_tensors(trainer, "full_parameters")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All steps are made."""
        self.seen.weights = _full_tensors(trainer, "full_parameters")
        self.seen.buffers = full_buffers(pl_module)
        self.seen.state = optimizer_state(trainer, pl_module)
        for handle in self._handles:
            handle.remove()
        vars(pl_module).pop("on_before_optimizer_step", None)


@compat.only_its_own_batch_hooks
class ReferenceProbe(Probe):
    """Also begins with the weights that the layout began with, and takes its learning rates where they are given."""

    def __init__(self, start: Mapping[str, Tensor], given: list[list[float]] | None = None) -> None:
        super().__init__()
        self._start = start
        self._given = given or []
        self.unused: list[str] = []

    @torch.no_grad()
    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The same weights and buffers."""
        parameters = dict(pl_module.named_parameters())
        here = {**parameters, **dict(pl_module.named_buffers())}
        missing = [name for name in parameters if name not in self._start]
        more = [name for name in self._start if name not in here]
        if missing or more:
            raise ConfigError(
                "the model under the layout has not the parameters that it has in one process",
                where=f"parameter {(more or missing)[0]}",
                why=f"only {'under the layout' if more else 'in one process'}: {', '.join((more or missing)[:5])}",
                fix="build the same layers in both; what depends on the number of ranks cannot be compared",
            )
        for name, tensor in self._start.items():  # without the buffers of stages that rank 0 does not have
            here[name].copy_(tensor)

    def _applied(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        """The schedule continues; its rates are replaced in each step."""
        number = len(self.seen.rates)
        if number < len(self._given):
            for group, rate in zip(optimizer.param_groups, self._given[number], strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
        super()._applied(trainer, module, optimizer)


@compat.only_its_own_batch_hooks
class LayoutProbe(Probe):
    """Also leaves what the reference needs: the weights at the start, the batches, and how the model is split."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self._batches: list[Any] = []
        self._digests: list[str] = []
        self._others: dict[str, Tensors] = {}
        self._facts: dict[str, Any] = {}
        self._unlike: list[str] = []
        self._contexts: list[Any] = []
        self._at_first: Generators | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """From here on each batch is seen as it comes from the loader, before a strategy splits it."""
        super().setup(trainer, pl_module, stage)
        strategy: Any = trainer.strategy
        of_sampler = trainer.distributed_sampler_kwargs or {}
        self._replica = (int(of_sampler.get("rank", 0)), int(of_sampler.get("num_replicas", 1)))
        first = gather_objects(self._replica[0]).index(self._replica[0]) if trainer.world_size > 1 else 0
        keeps = first == trainer.global_rank
        move, build = strategy.batch_to_device, strategy.setup

        def noted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if trainer.training:
                self._digests.append(digest(batch))
                if keeps:
                    self._batches.append(detached(batch))
            return move(batch, *args, **kwargs)

        def built(*args: Any, **kwargs: Any) -> Any:
            """Parts of models that each rank initialized differently would make a model that no rank has."""
            before = {name: _start(p) for name, p in pl_module.named_parameters()}
            done = build(*args, **kwargs)
            after = _full_tensors(trainer, "full_parameters")
            known = [name for name, p in before.items() if p is not None and name in after]
            self._unlike = [name for name in known if not torch.equal(before[name], after[name])]  # type: ignore[arg-type]
            return done

        strategy.batch_to_device, strategy.setup = noted, built

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The first sample has not been drawn: an epoch that begins with these generators is that of the training."""
        if self._at_first is None:
            self._at_first = cpu_states()

    def begin(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Rank 0's weights are those that the reference begins with."""
        parameters = _full_tensors(trainer, "full_parameters")
        start = {**parameters, **full_buffers(pl_module)}
        own = {plain_name(name) for name, p in pl_module.named_parameters() if p.requires_grad}
        trainable = set().union(*gather_objects(own))  # a stage of a pipeline is one rank's
        if not trainable & parameters.keys():  # flat parameters have other names
            trainable = set(parameters)
        contexts = [part.__dict__.get("_context_parallel") for part in pl_module.modules()]
        self._contexts = [one for one in contexts if one is not None]
        self._others["start"] = _unlike_rank_0(start)
        if trainer.global_rank == 0:
            torch.save(start, self._plan.folder / START)
        mesh = getattr(pl_module, "device_mesh", None)
        knows = hasattr(trainer.strategy, "full_parameters")  # of shards that are no DTensors
        self._facts = {
            "placements": placements(pl_module) if not knows else {},
            "held": "in full on each rank" if not knows else None,
            "stages": _stages(trainer.strategy),
            "micro_batches": 1,
            "mesh": dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True)) if mesh is not None else {},
            "expert": int(getattr(getattr(trainer.strategy, "layout", None), "expert", 1)),
            "mixtures": sum("_expert_mesh" in part.__dict__ for part in pl_module.modules()),
            "trainable": [name for name in parameters if name in trainable],
            "batch_norms": local_batch_norms(pl_module),
            "local_buffers": local_statistics(pl_module),
            "automatic": pl_module.automatic_optimization,
            "length": _length(trainer.train_dataloader),
            "accumulate": int(trainer.accumulate_grad_batches),
            "world_size": trainer.world_size,
            "max_steps": trainer.max_steps,
            "clips": trainer.gradient_clip_val,
        }

    def first_step(self, trainer: L.Trainer, optimizer: Any) -> None:
        """The norm by which gradients are clipped."""
        self._facts["micro_batches"] = getattr(trainer.strategy, "micro_batches", 1)
        self._facts |= clipping_norm(trainer, optimizer, self.seen.gradients)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any) -> None:
        """A strategy that clips by itself says behind the first step by which norm."""
        super().on_train_batch_end(trainer, pl_module, outputs, *args)
        if self._optimizers and "clipped_by" not in self._facts:
            self._facts |= own_clipping_norm(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """All notes are left in the folder."""
        super().on_train_end(trainer, pl_module)
        for name in ("batch_to_device", "setup"):  # the wrappers, which are this object's alone
            delattr(trainer.strategy, name)
        noted = {
            "state": self.seen.state or {},
            **{name: getattr(self.seen, name) for name in ("gradients", "applied", "first", "weights", "buffers")},
        }
        for name, found in noted.items():
            self._others[name] = _unlike_rank_0(found)
        index, count = self._replica
        notes = {
            **self._facts,
            "coordinates": _coordinates(pl_module),
            "replica": index,
            "replicas": count,
            "losses": self.seen.losses,
            "digests": self._digests[: len(self.seen.losses)],
            "dropouts": self.dropouts,
            "others": self._others,
            "unlike": self._unlike,
            "rates": self.seen.rates,
            "knows_state": self.seen.state is not None,
            "knows_applied": not _clips_within_step(trainer.strategy),
            "read": self._read(trainer),
            "attentions": max((int(one.calls) for one in self._contexts), default=0),
        }
        if trainer.global_rank == 0:
            notes |= noted
        folder = self._plan.folder
        torch.save(notes, folder / rank_file(trainer.global_rank))
        if self._batches:
            # A loader may make a batch that is not trained on any more.
            torch.save(self._batches[: len(self.seen.losses)], folder / batches_file(index))

    def _read(self, trainer: L.Trainer) -> list[Reading]:
        """What this rank reads in an epoch."""
        first = self._at_first if self._at_first is not None else cpu_states()
        return read_epochs(trainer.train_dataloader, (first, cpu_states()), gather_objects)


def _gradients_of(trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> Tensors:
    """Those that are there; with several optimizers another's may be there as well, of a loss that is not its own."""
    found = _full_tensors(trainer, "full_gradients")
    return _of_optimizer(found, module, optimizer) if len(trainer.optimizers) > 1 else found


def _clips_within_step(strategy: Any) -> bool:
    """DeepSpeed's engine, which has no full gradients any more when its optimizer begins."""
    return hasattr(strategy, "clipping_norm")


def _of_optimizer(gradients: Tensors, module: L.LightningModule, optimizer: Any) -> Tensors:
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    mine = {plain_name(name) for name, p in module.named_parameters() if id(p) in own}
    return {name: grad for name, grad in gradients.items() if name in mine}


def _full_tensors(trainer: L.Trainer, what: str) -> Tensors:
    """`full_parameters` or `full_gradients`: the strategy's own, or those of the module."""
    own = getattr(trainer.strategy, what, None)
    if own is not None:
        found: Tensors = own()
        # A copy: what is on the CPU may be the very tensor that is clipped or trained next.
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}
    read = full_gradients if what == "full_gradients" else full_parameters
    return read(trainer.lightning_module)


def _length(loader: Any) -> int | None:
    """The batches of an epoch; None for an iterable dataset."""
    try:
        return len(loader) if not isinstance(loader, Mapping | list | tuple) else min(map(len, _flat(loader)))
    except TypeError:  # as Python says of objects without a length
        return None


def _flat(loaders: Any) -> list[Any]:
    return list(loaders.values() if isinstance(loaders, Mapping) else loaders)


def _stages(strategy: Any) -> dict[str, list[int]]:
    """The ranks that hold a parameter, in a pipeline."""
    held: dict[str, list[int]] = {}
    if hasattr(strategy, "own_parameters"):
        for rank, names in enumerate(gather_objects(list(strategy.own_parameters()))):
            for name in names:
                held.setdefault(name, []).append(rank)
    return held


def _coordinates(module: L.LightningModule) -> dict[str, int]:
    """Where this rank is on each dimension of the mesh."""
    mesh = getattr(module, "device_mesh", None)
    if mesh is None:
        return {"ranks": module.global_rank}
    return dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))


def _start(parameter: Tensor) -> Tensor | None:
    """A copy of an unsplit parameter that has values."""
    if parameter.is_meta or is_dtensor(parameter):
        return None
    return parameter.detach().to("cpu", copy=True)


def _unlike_rank_0(tensors: Tensors) -> Tensors:
    """What this rank has otherwise than rank 0, bit for bit."""
    own = {name: hashlib.sha256(bytes_of(tensor)).digest() for name, tensor in tensors.items()}
    first = gather_objects(own)[0]
    return {name: tensor for name, tensor in tensors.items() if first.get(name) != own[name]}
