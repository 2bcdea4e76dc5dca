"""The same GPT with a mixture of experts in each block, of which every byte takes two (arXiv:2401.04088)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt.model import GPT, Attention

__all__ = ["MixtureGPT"]


class Expert(nn.Module):
    """A two-layer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class Mixture(nn.Module):
    """The two experts with the largest weights of the router's softmax, which are made to add up to one."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))
        self.top_k = 2

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, expert(tokens[row]) * weights[row, place].unsqueeze(-1))
        return out.view_as(x)


class MixtureBlock(nn.Module):
    """Attention, then a mixture, each added to the stream that it reads normalised."""

    def __init__(self, width: int, heads: int, context: int, experts: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, context, dropout=0.0)
        self.mixture_norm = nn.LayerNorm(width, bias=False)
        self.mixture = Mixture(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.mixture(self.mixture_norm(x))
        return y


class MixtureGPT(GPT):
    """A GPT whose perceptrons are mixtures; there is no loss for the router's load.

    Args:
        experts: In each block.
        width: Size of the residual stream.
        heads: Of attention.
        context: The longest sequence, in bytes.
        **others: What else `GPT` takes; but for `dropout`.

    Example:
        >>> MixtureGPT(experts=4, layers=1, width=32, heads=2)(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    def __init__(self, experts: int = 4, width: int = 128, heads: int = 4, context: int = 128, **others: Any) -> None:
        super().__init__(width=width, heads=heads, context=context, **others)
        self.blocks = nn.ModuleList(MixtureBlock(width, heads, context, experts) for _ in self.blocks)
        self.blocks.apply(self._initialise)
        with torch.no_grad():
            for name, weight in self.blocks.named_parameters():
                if name.endswith(("attention.out.weight", "down.weight")):
                    weight.div_(math.sqrt(2 * self.layers))
