"""A small model, how it is trained on a mesh and in one process, and how the two are compared; runs in the ranks."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fairlead.errors import ConfigError
from fairlead_distributed.full_state import full_gradients, full_parameters
from fairlead_strategies import FSDPStrategyConfig
from fairlead_strategies.mesh.config import MeshStrategyConfig
from fairlead_strategies.mesh.parallelize import _parameter_groups as parameter_groups
from fairlead_strategies.mesh_build import build

ranks: Any = importlib.import_module("ranks")  # beside this file
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
BATCH = 8
"""Samples in a batch of all replicas together."""
COUNTED = ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_")


class Block(nn.Module):
    """A norm and a pair of layers, added to the stream."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(self.up(self.norm(x)).tanh()))
        return out


class Net(pl.LightningModule):
    """A small residual network that notes what it computes.

    `dtypes` are the formats of the activations between its blocks, `batches` what its steps were given.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inlet = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(12, 2)
        self.losses: list[Tensor] = []
        self.batches: list[Tensor] = []
        self.dtypes: set[torch.dtype] = set()
        self.gradients: dict[str, Tensor] = {}
        self.clipped: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
            self.dtypes.add(x.dtype)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self(x).to(y.dtype), y)
        self.batches.append(x)
        self.losses.append(loss.detach())
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *clipping: Any, **named: Any) -> None:
        first = not self.gradients
        if first:
            self.gradients = gradients(self)
        super().configure_gradient_clipping(optimizer, *clipping, **named)
        if first:
            self.clipped = gradients(self)

    def configure_optimizers(self) -> Any:
        # Fused: all parameters of a group are in one list, however each is split.
        groups = [{"params": [p for p in self.parameters() if (p.ndim > 1) is matrix]} for matrix in (True, False)]
        # Gradients far below eps would turn differences of rounding into steps.
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-5, fused=True)

    def train_dataloader(self) -> Any:
        replicas = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: Any = DistributedSampler(DATA, **replicas, shuffle=False)
        return DataLoader(DATA, batch_size=BATCH // replicas["num_replicas"], sampler=sampler)


class Wraps(Net):
    """Chooses two units itself, and leaves the rest to the strategy."""

    def configure_model(self) -> None:
        if getattr(self.trainer.strategy, "name", None) == "fsdp":
            self.add_module("inlet", wrap(self.inlet))
            self.blocks[1] = wrap(self.blocks[1])


class WrapsWithOptions(Net):
    """Gives one unit options of its own, as FullyShardedDataParallel took them."""

    def configure_model(self) -> None:
        self.add_module("inlet", wrap(self.inlet, reshard_after_forward=False))


class WrapsByTheFirstFSDP(Net):
    """Wraps a layer in FullyShardedDataParallel."""

    def configure_model(self) -> None:
        self.add_module("inlet", FullyShardedDataParallel(self.inlet, device_id=torch.device("cpu")))


class Shards(Net):
    """Shards some of its layers itself, and forgets the rest; its ranks begin alike."""

    def __init__(self) -> None:
        torch.manual_seed(100)
        super().__init__()
        with torch.no_grad():
            self.head.weight += torch.randn_like(self.head.weight) * (dist.is_initialized() and dist.get_rank())

    def configure_model(self) -> None:
        mesh = getattr(self, "device_mesh", None)
        if mesh is not None and not isinstance(self.blocks[0], FSDPModule):
            for block in self.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])


class Attention(nn.Module):
    """Causal attention of two heads, added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 2
        self.norm = nn.LayerNorm(12)
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, 6).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.out(y.transpose(1, 2).reshape(batch, time, -1))
        return out


class Text(Net):
    """Predicts the next of sixteen tokens."""

    def __init__(self, attention: bool = False) -> None:
        super().__init__()
        if attention:
            self.blocks = nn.ModuleList([Attention(), Block(0.0), Attention()])
        del self.inlet
        self.embedding = nn.Embedding(16, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out

    def training_step(self, batch: list[Tensor]) -> Tensor:
        tokens = (torch.cat([batch[0], batch[1]], 1) * 10).long() % 16
        logits = self(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())
        self.log("loss", loss, prog_bar=True)
        self.losses.append(whole(loss))
        return loss


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randn(48, 2, generator=generator))


DATA = _data()
KINDS: dict[str, type[Net]] = {
    kind.__name__: kind for kind in (Net, Text, Wraps, WrapsWithOptions, WrapsByTheFirstFSDP, Shards)
}


class Count(pl.Callback):
    """Counts the collectives of the last optimizer step, in torch's own profile of it."""

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()
        self._profile: Any = None

    def on_train_batch_start(self, trainer: pl.Trainer, net: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == trainer.num_training_batches - trainer.accumulate_grad_batches:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self._profile.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, net: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == trainer.num_training_batches - 1:
            self._profile.stop()
            self.collectives = Counter(event.name for event in self._profile.events() if event.name in COUNTED)


class Held(pl.Callback):
    """The bytes of parameters on this rank between forward and backward, of gradients, and of Adam's moments."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def on_before_backward(self, trainer: pl.Trainer, net: pl.LightningModule, loss: Tensor) -> None:
        units: list[Any] = [unit._get_fsdp_state() for unit in net.modules() if isinstance(unit, FSDPModule)]
        all_of = [one for unit in units for group in parameter_groups(unit) for one in group.fsdp_params]
        gathered = [one._unsharded_param for one in all_of if hasattr(one, "_unsharded_param")]
        self.found["parameters"] = distinct([*(one._sharded_param_data for one in all_of), *gathered])

    def on_before_optimizer_step(self, trainer: pl.Trainer, net: pl.LightningModule, optimizer: Any) -> None:
        gradients: list[Any] = [one.grad for one in net.parameters()]
        self.found["gradients"] = distinct([one.to_local() for one in gradients])

    def on_train_end(self, trainer: pl.Trainer, net: pl.LightningModule) -> None:
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values() if value.ndim]
        self.found["optimizer"] = distinct([one.to_local() for one in states])


def distinct(tensors: list[Tensor]) -> int:
    """The bytes of all memory behind some tensors; that of what is freed is empty."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def held_bytes(config: MeshStrategyConfig) -> dict[str, int]:
    held, count = Held(), Count()
    fit(config, callbacks=[held, count])
    return {**held.found, **{name: count.collectives[name] for name in COUNTED}}


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of it, in float64."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to(torch.float64).clone()


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: grad.to(torch.float64) for name, grad in full_gradients(net).items()}


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: weight.to(torch.float64) for name, weight in full_parameters(net).items()}


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": 1, "enable_checkpointing": False, "use_distributed_sampler": False, **quiet, **options}
    if strategy is None:
        return pl.Trainer(accelerator="cpu", devices=1, **options)
    plugins, devices = [TorchElasticEnvironment(), *options.pop("plugins", [])], dist_size()
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, plugins=plugins, **options)


def dist_size() -> int:
    return dist.get_world_size()


def strategy(config: MeshStrategyConfig, **changes: Any) -> Any:
    size = dist_size()
    return build(config, ranks.context(config, "trainer", devices=size, world_size=size, **changes))


def seeded(seed: int, kind: str = "Net", **options: Any) -> Net:
    torch.manual_seed(seed)
    net: Net = KINDS[kind](**options)
    return net


def fit(config: MeshStrategyConfig, *, resumed: Path | None = None, **options: Any) -> tuple[pl.Trainer, Net]:
    """A fit on a mesh, in which every rank begins with other weights: those of rank 0 count."""
    net = seeded(100 + dist.get_rank(), **options.pop("net", {}))
    loop = trainer(strategy(config), **options)
    loop.fit(net, ckpt_path=resumed)
    return loop, net


def alone(*, resumed: Path | None = None, **options: Any) -> Net:
    """The same in this process alone, on the batches of all replicas together."""
    net = seeded(100, **options.pop("net", {}))
    trainer(None, **options).fit(net, ckpt_path=resumed)
    return net


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of any element."""
    assert one.keys() == other.keys(), (one.keys(), other.keys())
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


def mean_losses(net: Net) -> Tensor:
    """Of each batch over all ranks: replicas count alike, for each has as many ranks as another."""
    losses = torch.stack([whole(loss) for loss in net.losses])
    dist.all_reduce(losses)
    return losses / dist_size()


def compare(config: MeshStrategyConfig, reference: Net, **options: Any) -> dict[str, float]:
    """How far a mesh is from one process, and signs that both are alive."""
    return compared(fit(config, **options)[1], reference, weights(seeded(100, **options.get("net", {}))))


def compared(net: Net, reference: Net, start: dict[str, Tensor]) -> dict[str, float]:
    """The same of what was trained already, from these weights."""
    return {
        "loss": float((mean_losses(net) - torch.stack([whole(loss) for loss in reference.losses])).abs().max()),
        "gradients": apart(net.gradients, reference.gradients),
        "clipped": apart(net.clipped, reference.clipped),
        "weights": apart(weights(net), weights(reference)),
        "norm": norm(net.gradients),
        "clipped_norm": norm(net.clipped),
        "moved": min(float((start[name] - value).abs().max()) for name, value in weights(net).items()),
    }


def survives(config: MeshStrategyConfig, path: Path, **options: Any) -> bool:
    """Whether two epochs end with the same bits on this rank when the second is a resumed run."""
    straight = local(fit(config, max_epochs=2, **options)[1])
    first, early = fit(config, max_epochs=1, **options)
    first.save_checkpoint(path)
    resumed = local(fit(config, max_epochs=2, resumed=path, **options)[1])
    assert not all(map(torch.equal, local(early), straight)), "the second epoch changed nothing"
    return all(map(torch.equal, resumed, straight))


def local(net: nn.Module) -> list[Tensor]:
    """This rank's parts of the weights."""
    parameters: list[Any] = list(net.parameters())
    return [parameter.to_local().detach().clone() for parameter in parameters]


def through_layouts(configs: list[MeshStrategyConfig], folder: Path, **options: Any) -> float:
    """An epoch in a process alone, then one in each layout, each from the checkpoint before, then one alone again."""
    path = folder / "1.ckpt"
    first = trainer(None, **{name: value for name, value in options.items() if name != "net"})
    first.fit(seeded(100, **options.get("net", {})))
    if dist.get_rank() == 0:
        first.save_checkpoint(path)
    dist.barrier()
    for number, config in enumerate(configs, start=2):
        loop, _ = fit(config, max_epochs=number, resumed=path, **options)
        path = folder / f"{number}.ckpt"
        loop.save_checkpoint(path)
    epochs = len(configs) + 2
    end = alone(max_epochs=epochs, resumed=path, **options)
    return apart(weights(end), weights(alone(max_epochs=epochs, **options)))


def held(config: MeshStrategyConfig) -> dict[str, Any]:
    """Elements that this rank holds of each weight and of Adam's first moment, and how large each weight is."""
    return parts(*fit(config))


def parts(loop: pl.Trainer, net: Net) -> dict[str, Any]:
    """The same of what was trained already."""
    moments = {id(p): state["exp_avg"] for p, state in loop.optimizers[0].state.items()}
    return {
        name: (
            parameter.to_local().numel(),
            moments[id(parameter)].to_local().numel() if id(parameter) in moments else 0,
            parameter.numel(),
        )
        for name, parameter in net.named_parameters()
        if isinstance(parameter, DTensor)
    }


def counted(config: MeshStrategyConfig, **options: Any) -> dict[str, int]:
    """The collectives of one optimizer step without clipping."""
    count = Count()
    fit(config, callbacks=[count], **options)
    return {name: count.collectives[name] for name in COUNTED}


def shared_randomness(config: MeshStrategyConfig) -> list[tuple[list[Tensor], list[float]]]:
    """What each rank was given and what it lost, with dropout and generators that were seeded by the rank."""
    _, net = fit(config, net={"dropout": 0.5})
    found: list[Any] = [None] * dist_size()
    dist.all_gather_object(found, (net.batches, [float(loss) for loss in net.losses]))
    return found


def overflow(config: MeshStrategyConfig) -> list[float]:
    """How far the weights of a `16-mixed` fit moved in each step; in one, a gradient of the last rank overflows."""
    steps: list[float] = []

    class Overflows(pl.Callback):
        def on_train_batch_start(self, loop: pl.Trainer, net: pl.LightningModule, batch: Any, batch_idx: int) -> None:
            self.before = weights(net)

        def on_after_backward(self, loop: pl.Trainer, net: Any) -> None:
            # Behind the reduction, which would spread it to the shards of all ranks.
            if loop.global_step == 1 and dist.get_rank() == dist_size() - 1:
                net.head.weight.grad.to_local().fill_(float("inf"))

        def on_train_batch_end(self, loop: pl.Trainer, net: pl.LightningModule, *_: Any) -> None:
            steps.append(apart(self.before, weights(net)))

    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    fit(config, plugins=[scaler], callbacks=[Overflows()], limit_train_batches=3)
    return steps


def units(*configs: MeshStrategyConfig) -> list[list[str]]:
    """The units of a module that chooses two itself."""
    fitted = [fit(config, net={"kind": "Wraps"}, limit_train_batches=1)[1] for config in configs]
    return [[name for name, part in net.named_modules() if isinstance(part, FSDPModule)] for net in fitted]


def refused() -> list[str]:
    """What is said of settings of a module that shards itself, of options of `wrap`, and of the first FSDP."""
    no_shard = FSDPStrategyConfig(sharding_strategy="NO_SHARD", cpu_offload=True)
    found = []
    for kind in ("Shards", "WrapsWithOptions", "WrapsByTheFirstFSDP"):
        try:
            fit(no_shard if kind == "Shards" else FSDPStrategyConfig(), net={"kind": kind})
        except ConfigError as error:
            found.append(error.block())
    return found


def low_precision(config: MeshStrategyConfig) -> dict[str, Any]:
    """The formats of activations, weights and gradients, and whether it learned."""
    _, net = fit(config)
    return {
        "activations": net.dtypes,
        "weights": {parameter.dtype for parameter in net.parameters()},
        "moved": apart(weights(net), weights(seeded(100))),
    }
