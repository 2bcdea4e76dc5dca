"""Models of the kinds that people train, in plain torch: a plan is compared with what their steps really take.

Needs torch alone, of any version that the plan knows: the file is run on machines where nothing else is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPTBlock(nn.Module):
    """Of GPT-2: LayerNorm with bias, GELU, dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            one.view(batch, length, self.heads, -1).transpose(1, 2)
            for one in self.qkv(self.ln_1(x)).split(width, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))
        out: Tensor = x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)))))
        return out


class GPT(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


class LlamaAttention(nn.Module):
    """Rotary positions, grouped queries."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class LlamaMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaBlock(nn.Module):
    """RMSNorm before attention and perceptron."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.self_attn, self.mlp = LlamaAttention(width, heads, kv_heads), LlamaMLP(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    """Llama 3's shape."""

    cos: Tensor
    sin: Tensor

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocabulary: int, length: int
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        angle = torch.outer(torch.arange(length), 5e5 ** (-torch.arange(0, width // heads, 2) / (width // heads)))
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]].to(x.dtype), self.sin[: tokens.shape[1]].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.lm_head(self.norm(x))
        return out


class Bottleneck(nn.Module):
    """Of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.short: nn.Module | None = None
        if stride != 1 or inside != 4 * width:
            self.short = nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        out: Tensor = self.relu(y + (x if self.short is None else self.short(x)))
        return out


class ResNet(nn.Module):
    """ResNet-50."""

    def __init__(self, counts: tuple[int, ...] = (3, 4, 6, 3), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        inside, stages = 64, []
        for number, count in enumerate(counts):
            width = 64 << number
            blocks = [Bottleneck(inside, width, 1 if number == 0 else 2)]
            blocks += [Bottleneck(4 * width, width, 1) for _ in range(count - 1)]
            stages.append(nn.Sequential(*blocks))
            inside = 4 * width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return out


class ViT(nn.Module):
    """A vision transformer of torch's own layers."""

    def __init__(self, layers: int, width: int, heads: int, image: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x.mean(1))
        return out


class MixtureBlock(nn.Module):
    """Attention, and experts of which each token takes two."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads, self.top_k = heads, 2
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width, bias=False), nn.SiLU(), nn.Linear(2 * width, width, bias=False))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        tokens = self.norm_2(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            mixed = mixed.index_add(0, row, (expert(tokens[row]) * weights[row, place, None]).to(mixed.dtype))
        return x + mixed.view_as(x)


class Mixture(nn.Module):
    """A small mixture of experts over tokens."""

    def __init__(self, layers: int, width: int, heads: int, experts: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(MixtureBlock(width, heads, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Recurrent(nn.Module):
    """A perceptron on the last state of convolutions over time: no transformer at all."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.enter = nn.Linear(64, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 5, padding=2), nn.GroupNorm(8, width), nn.SiLU(), nn.Dropout(0.1))
            for _ in range(layers)
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x).transpose(1, 2)
        for layer in self.layers:
            y = y + layer(y)
        out: Tensor = self.head(y.mean(-1))
        return out


def token_loss(model: Any, tokens: Tensor) -> Tensor:
    """Of the next token; `tokens` is (rows, length + 1)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def class_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Of images or series and their classes."""
    return F.cross_entropy(model(batch[0]), batch[1])


def _tokens(rows: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (rows, length + 1))


SMALL: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], Callable[[Any, Any], Tensor]]] = {
    "gpt": (lambda: GPT(4, 256, 4, 128, 1024, 0.1), lambda rows: _tokens(rows, 128, 1024), token_loss),
    "llama": (lambda: Llama(4, 256, 8, 2, 704, 2048, 128), lambda rows: _tokens(rows, 128, 2048), token_loss),
    "resnet": (
        lambda: ResNet((1, 1, 1, 1), 10),
        lambda rows: (torch.randn(rows, 3, 64, 64), torch.randint(10, (rows,))),
        class_loss,
    ),
    "vit": (
        lambda: ViT(4, 256, 4, 64, 8),
        lambda rows: (torch.randn(rows, 3, 64, 64), torch.randint(1000, (rows,))),
        class_loss,
    ),
    "mixture": (lambda: Mixture(3, 128, 4, 4, 512), lambda rows: _tokens(rows, 64, 512), token_loss),
    "convolutions": (
        lambda: Recurrent(128, 4),
        lambda rows: (torch.randn(rows, 96, 64), torch.randint(10, (rows,))),
        class_loss,
    ),
}
"""Models that a CPU steps in a moment: how each is built, a batch of so many rows, its loss."""
