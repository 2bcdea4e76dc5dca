"""The Trainer's strategy for a pipeline, alone or with whatever else a mesh does to each stage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from fairlead.errors import ConfigError
from fairlead_distributed._sharded import absent
from fairlead_distributed.activation_checkpointing import checkpoint_layers
from fairlead_distributed.parallel.pipeline import Pipeline, clip_grad_norm_over_stages
from fairlead_distributed.parallel.pipeline.between_stages import Tied
from fairlead_runs.pipeline_schedule import stage_rank
from fairlead_strategies.layout import Layout
from fairlead_strategies.mesh.config import PipelineFields
from fairlead_strategies.mesh.device_mesh import RanksOnMesh, agree_on_random_numbers, make_mesh
from fairlead_strategies.mesh.experts import ExpertMeshes
from fairlead_strategies.mesh.full_state import Held, forget_absent
from fairlead_strategies.mesh.parallelize import checkpointed_classes, parallelize, reshard
from fairlead_strategies.pipeline.cutting import check_layers, for_stage, parts_of
from fairlead_strategies.pipeline.gathering import (
    full_optimizer_state,
    gather,
    keep_own,
    local_optimizer_state,
    local_state,
    named_groups,
    optimizer_entries,
    to_device,
)
from fairlead_strategies.pipeline.model import PipelinedModule, layer_names, layers_of
from fairlead_strategies.pipeline.stages import Split, split_module


class PipelineStrategy(RanksOnMesh, ModelParallelStrategy):
    """Splits the module into stages, and each stage as the rest of the mesh says; runs its steps as a pipeline.

    Optimizers, schedulers and hooks see this rank's parameters, under the names of the full model. But
    `configure_optimizers` finds every layer: those of other ranks are there meanwhile, without their values.
    """

    def __init__(self, config: PipelineFields, layout: Layout, **kwargs: Any) -> None:
        super().__init__(data_parallel_size=layout.data_parallel, tensor_parallel_size=layout.tensor, **kwargs)
        self.name = config.name
        self.layout = layout
        self._config = config
        self.pipelined: PipelinedModule | None = None
        self._split: Split | None = None
        self._tied: list[Tied] = []
        self._groups: list[list[list[str]]] = []

    # -- start

    def setup_environment(self) -> None:
        """Connects the ranks and makes the mesh."""
        self._setup_distributed()
        assert self.lightning_module is not None
        self._device_mesh = make_mesh(self.layout, self.root_device)
        vars(self.lightning_module)["_device_mesh"] = self._device_mesh
        agree_on_random_numbers(self._device_mesh, self.root_device)  # before the user's code draws a split of the data

    @property
    def micro_batches(self) -> int:
        """Into how many the last batch was cut."""
        return self.pipelined.pipeline.parts if self.pipelined is not None else 1

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks of this pipeline."""
        return self.device_mesh.get_group("pipeline")

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks of this stage, where each has some of its experts."""
        if self.layout.expert == 1:
            return None
        names = tuple(name for name in self.device_mesh.mesh_dim_names or () if name != "pipeline")
        mesh = self.device_mesh[names]
        return (mesh._flatten("stage") if len(names) > 1 else mesh).get_group()

    def setup(self, trainer: pl.Trainer) -> None:
        """Makes the optimizers, splits the module, and prepares what runs it."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._refuse(module, fitting)
        former = PipelinedModule.of(module)  # of an earlier fit or evaluation
        split = former.split if former is not None else None
        if former is not None:
            former.detach()
        if split is None:
            _from_rank_0(module, self.root_device)
            self.precision_plugin.convert_module(module)
            split = self._split_module(module)
        self._split = split
        self.model = module
        self.model_to_device()
        self._reset_optimizers_and_schedulers()
        if fitting:
            with split.with_all_layers(module) as names:
                self.setup_optimizers(trainer)
                self._groups = [named_groups(one, names) for one in self.optimizers]
            own = {id(one) for one in module.parameters()}
            for optimizer in self.optimizers:
                keep_own(optimizer, own)
        self._tied = split.tied_here(module, self.group.rank(), self.group)
        self.pipelined = PipelinedModule(module, split, self._pipeline)
        self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        self.barrier()
        self.setup_precision_plugin()
        if fitting:
            to_device(self.optimizers, self.root_device)
            self._say(split)
        agree_on_random_numbers(self.device_mesh, self.root_device)

    def model_to_device(self) -> None:
        """Moves what is not there yet, with every parameter as its shard."""
        self._reshard()
        super().model_to_device()

    def _reshard(self) -> None:
        """What is called behind an evaluation finds parameters that the optimizers know.

        A stage's root is no part of the module, which so does not see to it itself.
        """
        assert self._split is not None
        for stage in self._split.stages:
            reshard(stage)

    def _refuse(self, module: pl.LightningModule, fitting: bool) -> None:
        if fitting and not module.automatic_optimization:
            raise ConfigError(
                "manual optimization does not work in a pipeline",
                where=f"{type(module).__name__}.automatic_optimization",
                why="forward and backward passes of the micro-batches follow each other in the schedule's order",
                fix="leave the optimization to the Trainer, or use fairlead_distributed.parallel.pipeline in a loop of "
                "your own",
            )
        if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
            rank_zero_warn(
                "a batch norm in a pipeline normalises each micro-batch by itself: not what one process does with the "
                "full batch. Layer, group and RMS norms do not depend on other samples."
            )

    def _split_module(self, module: pl.LightningModule) -> Split:
        config, pipeline, rank = self._config, self.layout.pipeline, self.group.rank()
        layers = layers_of(module)
        names, stages = layer_names(module, layers), pipeline * config.local_stages
        parts = parts_of(module, layers, names, stages, config)
        owners = [stage_rank(stage, stages, pipeline, config.schedule) for stage in range(stages)]
        check_layers(config, module, self.layout.tensor)
        if _more_than_stages(self.layout, config):
            _refuse_tied_on_one_rank(module, layers, parts, owners)
        split = split_module(module, layers, names, parts, owners, rank)
        experts = ExpertMeshes.of(self.device_mesh, self.layout.expert) if self.layout.expert > 1 else None
        for number, stage in zip((n for n, owner in enumerate(owners) if owner == rank), split.stages, strict=True):
            own = for_stage(config, stage)
            if _more_than_stages(self.layout, config):
                edges = number == 0, number == stages - 1
                parallelize(stage, self.device_mesh, own, self.root_device, stage=edges, experts=experts)
            elif own.activation_checkpointing:
                checkpoint_layers(stage, checkpointed_classes(own))
        return split

    def _pipeline(self, loss: Any, weight: Any) -> Pipeline:
        config = self._config
        replicas = None
        if self.layout.data_parallel > 1:
            names = [name for name in ("replicate", "shard") if name in (self.device_mesh.mesh_dim_names or ())]
            mesh = self.device_mesh[tuple(names)]
            replicas = (mesh._flatten("data") if len(names) > 1 else mesh).get_group()
        assert self._split is not None
        return Pipeline(
            self._split.stages,
            loss=loss,
            schedule=config.schedule,
            micro_batches=None if config.micro_batches == "auto" else config.micro_batches,
            weight=weight,
            group=self.group,
            device=self.root_device,
            replicas=replicas,
            tied=self._tied,
            check_loss=config.check_loss,
        )

    def _say(self, split: Split) -> None:
        config, ranks = self._config, self.layout.pipeline
        lines = [f"pipeline of {ranks} ranks, schedule {config.schedule}", *split.described]
        lines += [f"{name} is held by pipeline ranks {', '.join(map(str, held))}" for name, held in split.tied]
        rank_zero_info("\n".join(lines))

    # -- steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own step, whose loss runs the pipeline."""
        assert self.pipelined is not None
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer.fit_loop
        if loop.batch_idx == 0:
            self.pipelined.pipeline.check_next_batch = True
        if loop.batch_idx % self.lightning_module.trainer.accumulate_grad_batches == 0:
            for parameter in self.pipelined.pipeline.parameters:
                parameter.grad = None  # Lightning forgets them after this step's forward, which here has the backward
        with self.precision_plugin.train_step_context(), self.pipelined.training():
            loss = self.lightning_module.training_step(*args, **kwargs)
        if loop.batch_idx == 0 and self.layout.context > 1:
            self._check_attention()
        return loss

    def _check_attention(self) -> None:
        """Whether any stage has attention that sees the full sequence: a collective of the pipeline.

        Raises:
            ConfigError: On all ranks, where none has.
        """
        assert self._split is not None
        calls = sum(stage.__dict__["_context_parallel"].calls for stage in self._split.stages)
        total = torch.tensor(calls, device=self.root_device)
        dist.all_reduce(total, group=self.group)
        if not int(total):
            raise ConfigError(
                "context parallelism did nothing in any stage: no attention came by",
                where="trainer.strategy.context",
                why="it takes over torch.nn.functional.scaled_dot_product_attention, which was not called",
                fix="use that function for attention (Hugging Face: attn_implementation='sdpa'), or leave context out",
            )

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Each batch is reduced by its own schedule."""
        yield

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        copies = {id(one.parameter): one.parameter for one in self._tied if not one.counted}
        own = [p for p in self.precision_plugin.main_params(optimizer) if id(p) not in copies]
        clip_grad_norm_over_stages(own, clip_val, group=self.group, copies=copies.values(), stage=self.stage_group)

    # -- state

    def full_parameters(self) -> dict[str, Tensor]:
        """The parameters of all stages under the names of the full model, in CPU memory; a collective of all ranks.

        Of a weight that several stages hold each of them has its own.
        """
        return self._gather({name: (one, one) for name, one in self.own_parameters().items()}, everyone=True)

    def full_gradients(self) -> dict[str, Tensor]:
        """Their gradients, of those that have one; a collective of all ranks."""
        # Of an expert that others have this rank has no gradient, and takes part all the same.
        held = {
            name: (torch.zeros_like(one) if absent(one) else one.grad) for name, one in self.own_parameters().items()
        }
        return self._gather({name: (one, one) for name, one in held.items() if one is not None}, everyone=True)

    def _gather(self, own: Held, *, everyone: bool) -> dict[str, Any]:
        return gather(own, self.group, self.stage_group, self.root_device, everyone=everyone)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's, by their first name in the full model."""
        assert self._split is not None
        assert self.lightning_module is not None
        self._reshard()
        return self._split.parameters(self.lightning_module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of all stages on rank 0, under the names of the full model; a collective of all ranks."""
        assert self._split is not None
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        found = self._gather({name: (value, value) for name, value in own.items()}, everyone=False)
        return {name: found[name] for name in self._split.names.state if name in found}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state of all stages on rank 0, as one process has it; a collective of all ranks."""
        plain: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        names = {id(one): name for name, one in self.own_parameters().items()}
        forget_absent([plain])
        found = self._gather(optimizer_entries(plain, names), everyone=False)
        if self.global_rank:
            return {}
        return full_optimizer_state(plain, found, self._groups[self.optimizers.index(plain)])

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the optimizers' states over."""
        return True

    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The full checkpoint, on every rank."""
        return Strategy.load_checkpoint(self, os.fspath(checkpoint_path), weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Rank 0 has all of it, and writes it."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """This rank's layers from a full state, of any strategy."""
        assert self._split is not None
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = local_state(checkpoint["state_dict"], own, self._split.names)
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """This rank's part of full optimizer states, of any strategy."""
        for optimizer, groups, state in zip(self.optimizers, self._groups, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(local_optimizer_state(state, groups, self.own_parameters()))
        forget_absent(self.optimizers)
        to_device(self.optimizers, self.root_device)

    def teardown(self) -> None:
        """Ends the CheckpointIO, which Lightning leaves out here; `self(...)` goes through all stages from now on."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()


def _more_than_stages(layout: Layout, config: PipelineFields) -> bool:
    return layout.world_size > layout.pipeline or config.cpu_offload or config.mixed_precision is not None


def _refuse_tied_on_one_rank(module: nn.Module, layers: list[nn.Module], parts: list[range], owners: list[int]) -> None:
    """Two stages of one rank are sharded each by itself, and a parameter can be sharded once."""
    names = {id(one): name for name, one in module.named_parameters()}
    holders: dict[tuple[int, int], int] = {}
    for stage, part in enumerate(parts):
        for parameter in (id(one) for number in part for one in layers[number].parameters()):
            other = holders.setdefault((owners[stage], parameter), stage)
            if other != stage:
                raise ConfigError(
                    f"{names[parameter]} is shared by the stages {other} and {stage}, which lie on the same rank",
                    where="trainer.strategy.schedule",
                    why="each stage is sharded by itself, and a parameter can be sharded only once",
                    fix="schedule: 1f1b, or another split, so that these layers are on different ranks",
                )


def _from_rank_0(module: nn.Module, device: torch.device) -> None:
    """All ranks begin with the weights of rank 0, as with DDP, one at a time."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            there = tensor.detach().to(device)
            dist.broadcast(there, src=0)
            tensor.copy_(there)
