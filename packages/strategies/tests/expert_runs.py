"""A small model with mixtures of experts, trained with its experts on several ranks; runs in the ranks."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fairlead.errors import ConfigError
from fairlead_distributed import NonFiniteGradientError, clip_grad_norm, first_divergence
from fairlead_distributed._sharded import absent
from fairlead_distributed.full_state import full_gradients
from fairlead_strategies import HybridStrategyConfig
from fairlead_strategies.mesh.experts import ExpertMeshes, Experts
from fairlead_strategies.mesh_build import build

mesh_runs: Any = importlib.import_module("mesh_runs")  # beside this file
EXPERTS = 4


class Expert(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 24)
        self.down = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


class Mixture(nn.Module):
    """Of four experts each token takes two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, EXPERTS)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.top_k = 2

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k, dim=-1)
        out = 0 * x
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return out


class MixtureBlock(nn.Module):
    """A norm and a mixture, added to the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mixture = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mixture(self.norm(x))
        return out


class Mixed(mesh_runs.Net):  # type: ignore[misc]
    """A block without experts between two with them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MixtureBlock(), mesh_runs.Block(0.0), MixtureBlock()])


class MixedText(mesh_runs.Text):  # type: ignore[misc]
    """Attention before a mixture."""

    def __init__(self) -> None:
        super().__init__(attention=True)
        self.blocks[1] = MixtureBlock()


mesh_runs.KINDS |= {"Mixed": Mixed, "MixedText": MixedText}


class Tied(Mixture):
    """Experts that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        for expert in list(self.experts)[1:]:
            expert.up = self.experts[0].up


class Normed(Mixture):
    """Experts that note what they saw."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)) for _ in range(EXPERTS))


class Returning(Mixture):
    """Also returns what the router said."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.router(x)


def refusals() -> list[str]:
    """What is said of modules whose experts cannot be divided, though they look as if they could."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    said = []
    for module in (Tied(), Normed(), Returning(), nn.Linear(2, 2)):
        try:
            Experts(nn.ModuleDict({"mixture": module}), ExpertMeshes.of(mesh, 2))
        except ConfigError as error:
            said.append(str(error))
    return said


def through_shards(config: HybridStrategyConfig, folder: Path, **options: Any) -> bool:
    """Whether three epochs end with the same bits on this rank when each is a start of its own, from shards.

    Two saves: what the second one writes is what was loaded from the first and trained on.
    """
    straight = mesh_runs.local(mesh_runs.fit(config, max_epochs=3, **options)[1])
    shards, path = config.model_copy(update={"state_dict_type": "sharded"}), None
    for number in (1, 2, 3):
        loop, net = mesh_runs.fit(shards, max_epochs=number, resumed=path, **options)
        path = folder / f"shards of {config.replicate} copies" / f"{number}.ckpt"
        loop.save_checkpoint(path)
    return all(map(torch.equal, mesh_runs.local(net), straight))


def fabric(folder: Path) -> dict[str, Any]:
    """A loop of Fabric on two ranks against one process; saved, and gone on from: there, and in one process."""

    def train(step: Callable[[Any], None], module: nn.Module, optimizer: Any, rows: slice) -> None:
        for start in range(0, 24, 8):
            x, y = (tensor[start : start + 8][rows] for tensor in mesh_runs.DATA.tensors)
            step(nn.functional.mse_loss(module(x), y))
            optimizer.step()
            optimizer.zero_grad()

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        first, *rest = module.parameters()
        groups: list[dict[str, Any]] = [{"params": rest[::-1], "lr": 0.01}, {"params": [first]}]
        return torch.optim.Adam(groups, lr=0.02, eps=1e-5)

    def seeded(seed: int) -> Any:
        return mesh_runs.seeded(seed, kind="Mixed")

    def away(module: nn.Module) -> float:
        found = mesh_runs.weights(module)
        return max(float((found[name] - one).abs().max()) for name, one in mesh_runs.weights(plain).items())

    rank, rows = dist.get_rank(), slice(dist.get_rank(), None, 2)
    plain = seeded(100)
    optimizer: Any = adam(plain)
    train(lambda loss: loss.backward(), plain, optimizer, slice(None))
    config = HybridStrategyConfig(expert=2)
    strategy = build(config, mesh_runs.ranks.context(config, "fabric"))
    engine = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()])
    engine.launch()
    module = engine.setup_module(seeded(100 + rank))
    optimizer = engine.setup_optimizers(adam(module))
    train(engine.backward, module, optimizer, rows)
    found: dict[str, Any] = {"apart": away(module.module)}
    path = folder / "fabric.ckpt"
    with torch.no_grad():
        module(mesh_runs.DATA.tensors[0][:4])  # leaves the outermost parameters gathered
    engine.save(path, {"adam": optimizer, "model": module, "epoch": 3})
    engine.barrier()
    train(engine.backward, module, optimizer, rows)
    again = engine.setup_module(seeded(200 + rank))
    other = engine.setup_optimizers(adam(again))
    state: dict[str, Any] = {"model": again, "adam": other, "epoch": 0}
    found["left"] = engine.load(path, state)
    train(engine.backward, again, other, rows)
    found |= {
        "epoch": state["epoch"],
        "resumed": all(map(torch.equal, mesh_runs.local(again), mesh_runs.local(module))),
    }
    whole = torch.load(path, weights_only=True)
    plain = seeded(300)
    plain.load_state_dict(whole["model"])
    optimizer = adam(plain)
    optimizer.load_state_dict(whole["adam"])
    train(lambda loss: loss.backward(), plain, optimizer, slice(None))
    return {**found, "alone": away(module.module)}


def fabric_in_shards(folder: Path) -> bool:
    """Whether a loop of Fabric goes on from shards with the same bits on this rank, optimizer and all."""
    config = HybridStrategyConfig(expert=2, state_dict_type="sharded")
    strategy = build(config, mesh_runs.ranks.context(config, "fabric"))
    engine = Fabric(accelerator="cpu", strategy=strategy, devices=2, plugins=[TorchElasticEnvironment()])
    engine.launch()
    x, y = (tensor[dist.get_rank() : 16 : 2] for tensor in mesh_runs.DATA.tensors)

    def made(seed: int) -> tuple[Any, Any]:
        module = engine.setup_module(mesh_runs.seeded(seed, kind="Mixed"))
        return module, engine.setup_optimizers(torch.optim.Adam(module.parameters(), lr=0.02))

    def train(module: Any, optimizer: Any) -> list[Tensor]:
        for _ in range(3):
            engine.backward(nn.functional.mse_loss(module(x), y))
            optimizer.step()
            optimizer.zero_grad()
        return mesh_runs.local(module)  # type: ignore[no-any-return]

    module, optimizer = made(100)
    train(module, optimizer)
    engine.save(folder / "shards of fabric", {"adam": optimizer, "model": module})
    again, other = made(200)
    engine.load(folder / "shards of fabric", {"adam": other, "model": again})
    return all(map(torch.equal, train(module, optimizer), train(again, other)))


def norms(net: nn.Module) -> dict[str, Any]:
    """The norms by which it would be clipped, against those of the whole gradients; and of one that is no number."""
    own = [p for p in net.parameters() if not absent(p)]
    for number, parameter in enumerate(own):
        parameter.grad = torch.full_like(parameter, 1.0 + number + 10 * dist.get_rank())
    every = [grad.double() for grad in full_gradients(net).values()]
    squares = math.sqrt(sum(float(grad.square().sum()) for grad in every))
    largest = max(float(grad.abs().max()) for grad in every)
    found: dict[str, Any] = {
        "2": float(clip_grad_norm(net.parameters(), 1e9)) / squares,
        "inf": float(clip_grad_norm(net.parameters(), 1e9, math.inf)) / largest,
    }
    experts = [p for name, p in net.named_parameters() if ".experts." in name and p.grad is not None]
    if dist.get_rank() == dist.get_world_size() - 1:
        experts[0].grad.to_local().fill_(math.inf)  # type: ignore[union-attr]
    try:
        clip_grad_norm(net.named_parameters(), 1.0, error_if_nonfinite=True)
    except NonFiniteGradientError as error:
        found["no number"] = str(error)
    return found


@torch.no_grad()
def divergence(net: nn.Module) -> list[str | None]:
    """What is said of copies of the experts that are alike, and of one that is not."""
    alike = first_divergence(net)
    if dist.get_rank() == dist.get_world_size() - 1:
        mine: Any = next(p for name, p in net.named_parameters() if ".experts." in name and not absent(p))
        mine.to_local().add_(1.0)
    other = first_divergence(net)
    return [None if one is None else one.name for one in (alike, other)]
