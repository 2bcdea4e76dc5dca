"""Small models of the kinds that are split over ranks, built here: nothing is downloaded.

Their layers have the names and the code of those that they stand for, so that what recognises one recognises the
other. All take (batch, tokens) of int64 and return (batch, tokens, VOCABULARY).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 64


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotary positions: the pairs are (x[i], x[i + d/2])."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LlamaAttention(nn.Module):
    """Grouped queries; with `bias` as Qwen2 has it, with `head_norms` as Qwen3."""

    def __init__(self, width: int, heads: int, kv_heads: int, bias: bool, head_norms: bool) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, width // heads
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, False)
        self.q_norm = RMSNorm(self.head_dim) if head_norms else None
        self.k_norm = RMSNorm(self.head_dim) if head_norms else None

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, is_causal: bool) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return cast(Tensor, self.o_proj(y.transpose(1, 2).flatten(2)))


class LlamaMLP(nn.Module):
    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias)
        self.up_proj = nn.Linear(width, hidden, bias)
        self.down_proj = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class MoE(nn.Module):
    """A mixture of experts, with biases; the chosen weights are made to add up to one, or not."""

    def __init__(self, width: int, hidden: int, experts: int, top_k: int, normalised: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(width, hidden, bias=True) for _ in range(experts))
        self.top_k, self.normalised = top_k, normalised

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k, dim=-1)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return out.view_as(x)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, attention: LlamaAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(width), RMSNorm(width)
        self.self_attn, self.mlp = attention, mlp

    def forward(self, hidden_states: Tensor, cos: Tensor, sin: Tensor, is_causal: bool) -> Tensor:
        x = hidden_states
        x = x + self.self_attn(hidden_states=self.input_layernorm(x), cos=cos, sin=sin, is_causal=is_causal)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """A Llama: grouped queries, RMSNorm, SwiGLU, rotary positions. With `experts`, the MLP is a mixture of them.

    Args:
        layers: Blocks.
        width: Size of the residual stream.
        heads: Heads of queries; a multiple of `kv_heads`.
        kv_heads: Heads of keys and values.
        bias: As Qwen2 has it.
        head_norms: As Qwen3 has them.
        tied: The embedding and the head are one parameter.
        experts: Number of experts, of which each token takes two; 0 for an MLP.
        is_causal: A token sees those before it only.
    """

    frequency: Tensor

    def __init__(
        self,
        layers: int = 2,
        width: int = 32,
        heads: int = 8,
        kv_heads: int = 4,
        bias: bool = False,
        head_norms: bool = False,
        tied: bool = False,
        experts: int = 0,
        is_causal: bool = True,
    ) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            LlamaBlock(
                width,
                LlamaAttention(width, heads, kv_heads, bias, head_norms),
                MoE(width, 2 * width, experts, 2) if experts else LlamaMLP(width, 2 * width),
            )
            for _ in range(layers)
        )
        self.norm = RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight
        head = width // heads
        self.register_buffer("frequency", 10_000.0 ** (-torch.arange(0, head, 2) / head), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(tokens.shape[1]), self.frequency).repeat(1, 2)
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin(), self.is_causal)
        return cast(Tensor, self.lm_head(self.norm(x)))


class Conv1D(nn.Module):
    """transformers' linear layer of GPT-2: its weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.2), nn.Parameter(torch.randn(nf) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class GPT2Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.embed_dim = self.split_size = width
        self.num_heads, self.head_dim = heads, width // heads
        self.c_attn, self.c_proj = Conv1D(3 * width, width), Conv1D(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (part.view(*part.shape[:-1], -1, self.head_dim).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.c_proj(y.transpose(1, 2).flatten(2)))


class GPT2MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(4 * width, width), Conv1D(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.c_proj(F.gelu(self.c_fc(x))))


class GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = GPT2Attention(width, heads), GPT2MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return cast(Tensor, x + self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    """GPT-2: packed queries, keys and values, learned positions, a head that is tied to the embedding."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, positions: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(positions, width)
        self.h = nn.ModuleList(GPT2Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return cast(Tensor, self.lm_head(self.ln_f(x)))


class Encoder(nn.Module):
    """torch.nn's encoder, with learned positions in a parameter."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, positions: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(1, positions, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        return cast(Tensor, self.out(self.encoder(x)))


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of each token's successor; token 0 does not count."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def sample_tokens(batch: int = 3, length: int = 17, seed: int = 5) -> Tensor:
    """(batch, length) of int64. The first sequence ends in tokens that do not count."""
    tokens = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
    tokens[0, length // 2 :] = 0
    return tokens
