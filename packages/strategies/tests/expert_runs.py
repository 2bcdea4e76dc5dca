"""A small model with mixtures of experts, trained with its experts on several ranks; runs in the ranks."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, nn

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
