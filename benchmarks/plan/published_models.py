"""The models of published runs, as plain modules, so that they pass through the same trace as a user's job.

What a row does not say (which attention, which feed-forward, the experts) is here, from the published configuration
of that model. Position information that a kernel adds on the way (ALiBi in flash attention) costs no operator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Experts:
    """A mixture of experts."""

    width: int
    count: int
    chosen: int
    shared: int = 0
    """Width of the expert that sees all tokens; 0: there is none."""


@dataclass(frozen=True)
class Config:
    """A decoder: what its layers are made of."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int = 0
    """Learned positions; 0: rotary or none."""
    head_width: int = 0
    """0: hidden / heads."""
    style: str = "llama"
    """`llama`: RMSNorm, rotary positions, gated SiLU. `gpt`: LayerNorm, GELU, one product for q, k and v."""
    experts: Experts | None = None
    dense: int = 0
    """Layers at the front without experts."""
    latent: bool = False
    """Multi-head latent attention, with the ranks of DeepSeek-V3."""
    pattern: str = ""
    """A letter a layer, of a hybrid: M a Mamba-2 layer, * attention, E experts."""
    tied: bool = False
    qk_norm: bool = False
    clamped: bool = False
    """Experts with biases and a clamped gate (gpt-oss), whose elementwise operators no kernel fuses."""
    window: int = 0
    """How far every second layer attends; 0: all layers attend to everything before."""
    predicted: int = 0
    """Layers that predict a further token (DeepSeek-V3's MTP), each with a pass of the head."""

    def kinds(self) -> str:
        """A letter a layer: what differs in work has another letter."""
        if self.pattern:
            return self.pattern
        if self.window:
            return ("WX" * self.layers)[: self.layers]
        return "D" * self.dense + "X" * (self.layers - self.dense)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention over heads, of which several may share keys and values."""

    def __init__(self, config: Config, window: int = 0) -> None:
        super().__init__()
        self.window = window
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.width = config.head_width or config.hidden // config.heads
        self.rotary = config.style == "llama" and not config.pattern
        sizes = (self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width)
        self.sizes = sizes
        if config.style == "gpt":
            self.qkv = nn.Linear(config.hidden, sum(sizes), bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(config.hidden, size, bias=False) for size in sizes)
        self.norms = nn.ModuleList(nn.RMSNorm(self.width) for _ in range(2)) if config.qk_norm else None
        self.out = nn.Linear(sizes[0], config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(x).split(self.sizes, -1) if hasattr(self, "qkv") else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(rows, length, -1, self.width) for part in parts)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        if self.rotary:
            cos = x.new_empty(length, 1, self.width)
            q, k = rotate(q, cos, cos), rotate(k, cos, cos)
        if self.window:  # blocks of twice the window, causal, have as many pairs as a window that slides
            q, k, v = (part.reshape(-1, min(length, 2 * self.window), *part.shape[2:]) for part in (q, k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        out: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, -1))
        return out


class LatentAttention(nn.Module):
    """Multi-head latent attention: queries, keys and values through narrow products."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, q_rank, kv_rank = config.heads, 1536, 512
        self.plain, self.rotary, self.kv_rank = 128, 64, kv_rank
        self.q_down = nn.Linear(config.hidden, q_rank, bias=False)
        self.q_norm = nn.RMSNorm(q_rank)
        self.q_up = nn.Linear(q_rank, config.heads * (self.plain + self.rotary), bias=False)
        self.kv_down = nn.Linear(config.hidden, kv_rank + self.rotary, bias=False)
        self.kv_norm = nn.RMSNorm(kv_rank)
        self.kv_up = nn.Linear(kv_rank, config.heads * 2 * self.plain, bias=False)
        self.out = nn.Linear(config.heads * self.plain, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_up(self.q_norm(self.q_down(x))).view(rows, length, self.heads, -1)
        q, q_rotary = q.split((self.plain, self.rotary), -1)
        low, k_rotary = self.kv_down(x).split((self.kv_rank, self.rotary), -1)
        k, v = self.kv_up(self.kv_norm(low)).view(rows, length, self.heads, -1).chunk(2, -1)
        cos = x.new_empty(length, 1, self.rotary)
        q = torch.cat((q, rotate(q_rotary, cos, cos)), -1)
        k_rotary = rotate(k_rotary.unsqueeze(2), cos, cos).expand(-1, -1, self.heads, -1)
        k = torch.cat((k, k_rotary), -1)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(rows, length, -1))
        return out


class FeedForward(nn.Module):
    """GELU, or SiLU with a gate."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, width, bias=False) if config.style == "llama" else None
        self.up = nn.Linear(config.hidden, width, bias=False)
        self.down = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            out: Tensor = self.down(functional.gelu(self.up(x)))
        else:
            out = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class ExpertWeights(nn.Module):
    """The experts of a layer side by side: a batch of products."""

    def __init__(self, config: Config, of: Experts, gated: bool) -> None:
        super().__init__()
        self.gated, self.clamped = gated, config.clamped
        if config.clamped:
            self.up_bias = nn.Parameter(torch.empty(of.count, 1, of.width * 2))
            self.down_bias = nn.Parameter(torch.empty(of.count, 1, config.hidden))
        self.up = nn.Parameter(torch.empty(of.count, config.hidden, of.width * (2 if gated else 1)))
        self.down = nn.Parameter(torch.empty(of.count, of.width, config.hidden))

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.bmm(x, self.up.to(x.dtype))
        if self.clamped:
            gate, up = (inner + self.up_bias.to(x.dtype)).chunk(2, -1)
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            inner = (up + 1) * (gate * torch.sigmoid(gate * 1.702))
            return torch.bmm(inner, self.down.to(x.dtype)) + self.down_bias.to(x.dtype)
        if self.gated:
            gate, up = inner.chunk(2, -1)
            inner = functional.silu(gate) * up
        else:
            inner = functional.relu(inner).square()
        return torch.bmm(inner, self.down.to(x.dtype))


class Mixture(nn.Module):
    """Experts, all of which get equally many tokens, as the grouped products of the published runs do."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.experts is not None
        of = self.of = config.experts
        gated = not config.pattern  # of a hybrid: squared ReLU without a gate
        self.router = nn.Linear(config.hidden, of.count, bias=False)
        self.experts = ExpertWeights(config, of, gated)
        style = config if gated else replace(config, style="gpt")
        self.shared = FeedForward(style, of.shared) if of.shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        weights, _ = self.router(x).float().softmax(-1).topk(self.of.chosen, -1)
        each = -(-rows * length * self.of.chosen // self.of.count)
        order = torch.empty(self.of.count * each, dtype=torch.long, device=x.device)
        sent = x.flatten(0, 1).index_select(0, order).view(self.of.count, each, hidden)
        back = self.experts(sent).flatten(0, 1)
        back = back.index_select(0, order[: rows * length * self.of.chosen]).view(rows, length, -1, hidden)
        y = (back * weights.to(x.dtype).unsqueeze(-1)).sum(2)
        out: Tensor = y if self.shared is None else y + self.shared(x)
        return out


class Mamba(nn.Module):
    """A Mamba-2 layer, by chunks: products within a chunk, and a state that passes from one to the next."""

    def __init__(self, config: Config, heads: int = 64, width: int = 64, state: int = 128, groups: int = 8) -> None:
        super().__init__()
        self.heads, self.width, self.state, self.groups, self.chunk = heads, width, state, groups, 128
        inner, mixed = heads * width, heads * width + 2 * groups * state
        self.sizes = (inner, mixed, heads)
        self.into = nn.Linear(config.hidden, sum(self.sizes), bias=False)
        self.conv = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.norm = nn.RMSNorm(inner)
        self.out = nn.Linear(inner, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        z, mixed, step = torch.split(self.into(x), list(self.sizes), -1)
        mixed = functional.silu(self.conv(mixed.transpose(1, 2))[..., :length]).transpose(1, 2)
        shared = self.groups * self.state
        inner, b, c = torch.split(mixed, [self.sizes[0], shared, shared], -1)
        each, per = rows * length // self.chunk, self.heads // self.groups
        b, c = (part.reshape(each * self.groups, self.chunk, self.state) for part in (b, c))
        inner = inner.reshape(each * self.groups, self.chunk, per * self.width)
        decay = step.reshape(each * self.groups, 1, -1).mean(-1, keepdim=True)
        near = torch.bmm(torch.bmm(c, b.transpose(1, 2)) * decay, inner)
        states = torch.bmm(b.transpose(1, 2), inner).float() * decay
        y = near + torch.bmm(c, states.to(c.dtype))
        out: Tensor = self.out(self.norm(y.reshape(rows, length, -1) * functional.silu(z)))
        return out


class Layer(nn.Module):
    """One layer: attention and feed-forward, or of a hybrid one of them."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        norm = nn.LayerNorm if config.style == "gpt" else nn.RMSNorm
        parts: list[nn.Module] = []
        if kind in "DXW*":
            window = config.window if kind == "W" else 0
            parts.append(LatentAttention(config) if config.latent else Attention(config, window))
        if kind == "M":
            parts.append(Mamba(config))
        if kind == "E" or (kind in "XW" and config.experts is not None):
            parts.append(Mixture(config))
        elif kind in "DXW":
            parts.append(FeedForward(config, config.ffn))
        self.parts = nn.ModuleList(parts)
        self.norms = nn.ModuleList(norm(config.hidden) for _ in parts)

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


PLAN = {"q": "colwise", "k": "colwise", "v": "colwise", "qkv": "packed", "q_up": "colwise", "kv_up": "colwise",
        "gate": "colwise", "up": "colwise", "into": "packed", "out": "rowwise", "down": "rowwise",
        "embedding": "vocab", "head": "colwise"}  # fmt: skip


def plan_of(model: nn.Module) -> dict[str, str]:
    """How tensor parallelism splits each module."""
    return {name: PLAN[last] for name, _ in model.named_modules() if (last := name.rpartition(".")[2]) in PLAN}


class Decoder(nn.Module):
    """The model with its loss: what a training step calls."""

    def __init__(self, config: Config, kinds: str | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.positions, config.hidden) if config.positions else None
        self.layers = nn.ModuleList(Layer(config, kind) for kind in (config.kinds() if kinds is None else kinds))
        self.norm = (nn.LayerNorm if config.style == "gpt" else nn.RMSNorm)(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


NEMOTRON_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

KNOWN = {
    "deepseek-v3": Config(61, 7168, 128, 128, 18432, 129280, experts=Experts(2048, 256, 8, 2048), dense=3,
                          latent=True, predicted=1),
    "kimi_k2": Config(61, 7168, 64, 64, 18432, 163840, experts=Experts(2048, 384, 8, 2048), dense=1, latent=True),
    "gpt-oss-120b": Config(36, 2880, 64, 8, 2880, 201088, head_width=64, experts=Experts(2880, 128, 4), window=128,
                           clamped=True),
    "gpt-oss-20b": Config(24, 2880, 64, 8, 2880, 201088, head_width=64, experts=Experts(2880, 32, 4), window=128,
                          clamped=True),
    "qwen3-30b-a3b": Config(48, 2048, 32, 4, 6144, 151936, head_width=128, experts=Experts(768, 128, 8), qk_norm=True),
    "qwen3-235b-a22b": Config(94, 4096, 64, 4, 12288, 151936, head_width=128, experts=Experts(1536, 128, 8),
                              qk_norm=True),
    "nemotron_3_nano": Config(52, 2688, 32, 2, 0, 131072, head_width=128, experts=Experts(1856, 128, 6, 3712),
                              pattern=NEMOTRON_NANO),
    "mixtral-8x7b": Config(32, 4096, 32, 8, 14336, 32000, experts=Experts(14336, 8, 2)),
    "mixtral-8x22b": Config(56, 6144, 48, 8, 16384, 32768, experts=Experts(16384, 8, 2)),
    "nemotron4-15b": Config(32, 6144, 48, 8, 24576, 256000, style="gpt"),
    "nemotron4-340b": Config(96, 18432, 96, 8, 73728, 256000, style="gpt"),
}  # fmt: skip
"""By the published configurations (config.json of each model), as a row names them."""

GPT_LIKE = ("mpt", "gpt", "neox", "opt", "bloom", "megatron", "pythia", "nemotron4", "turing")


def config_of(row: dict[str, str]) -> Config:
    """The model of a published row: a known one by name, else what its columns say.

    Raises:
        ValueError: The row names an unknown model and does not say its sizes.
    """
    name = row["model"].lower().replace(" ", "-")
    if name in KNOWN:
        return KNOWN[name]
    missing = [column for column in ("layers", "hidden", "heads", "ffn", "vocab") if not row.get(column)]
    if missing:
        raise ValueError(f"{row['model']}: the row says no {', '.join(missing)}")
    layers, hidden, heads = (int(float(row[column])) for column in ("layers", "hidden", "heads"))
    kv_heads = int(float(row["kv_heads"] or heads))
    experts, ffn = None, row["ffn"]
    if ffn.startswith("moe:"):
        width, rest = ffn[4:].split("x", 1)
        count, rest = rest.split("top", 1)
        chosen, _, shared = rest.partition("+")
        ffn = width
        experts = Experts(int(width), int(count), int(chosen), int(width) if shared else 0)
    gpt = name.startswith(GPT_LIKE) or (kv_heads == heads and float(ffn) == 4 * hidden)
    vocab = int(float(row["vocab"]))
    return Config(
        layers, hidden, heads, kv_heads, int(float(ffn)), vocab,
        style="gpt" if gpt and experts is None else "llama",
        positions=int(row["seq"]) if name.startswith("mpt") else 0,
        tied=name.startswith("mpt"),
        experts=experts,
    )  # fmt: skip
