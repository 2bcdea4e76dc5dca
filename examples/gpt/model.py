"""A decoder-only transformer over bytes: pre-norm, rotary positions, tied embeddings."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "VOCABULARY"]

VOCABULARY = 256  # one token per byte: no tokenizer, nothing to download


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + d/2]) of each head by an angle that grows with the position (arXiv:2104.09864).

    `x` is (batch, heads, time, d), `cos` and `sin` are (time, d/2). The dot product of two rotated vectors depends
    only on the distance of their positions.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        frequency = 10_000.0 ** (-torch.arange(0, self.head_width, 2) / self.head_width)
        angle = torch.outer(torch.arange(context), frequency)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        cos, sin = self.cos[:time], self.sin[:time]
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to the stream that it reads normalised (pre-norm)."""

    def __init__(self, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads, context, dropout)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        # Squared ReLU (arXiv:2109.08668) is cheaper than GELU on a CPU and learns a little faster.
        y: Tensor = self.dropout(self.down(F.relu(self.up(self.mlp_norm(x))).square()))
        return x + y


class Head(nn.Module):
    """Logits: the embedding is the output matrix as well (weight tying, arXiv:1608.05859)."""

    def __init__(self, norm: nn.LayerNorm, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm = norm
        self.embedding = embedding

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


class GPT(L.LightningModule):
    """A GPT over bytes; it logs `train/loss`, `val/loss` (nats per byte) and `val/bits_per_byte`.

    Args:
        layers: number of blocks.
        width: size of the residual stream; a multiple of `2 * heads`.
        heads: attention heads per block.
        context: longest sequence, in bytes.
        lr: peak learning rate, reached after `warmup_steps`, then lowered to a tenth along a cosine.
        dropout: on the attention weights and on each block's two branches.
        warmup_steps: steps of linear warm-up.
        weight_decay: on matrices only, never on the gains of the norms.

    Raises:
        ValueError: `width` cannot be divided among the heads in pairs.

    Example:
        >>> GPT(layers=1, width=32, heads=2)(torch.zeros(1, 8, dtype=torch.long)).shape
        torch.Size([1, 8, 256])
    """

    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        lr: float = 1e-3,
        dropout: float = 0.0,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if width % (2 * heads):
            raise ValueError(f"width={width} must be a multiple of 2 * heads = {2 * heads}")
        self.save_hyperparameters()
        self.layers = layers
        self.context = context
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """GPT-2's scheme: what each branch adds to the stream is scaled down by the number of branches."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(3 * module.in_features))
        elif isinstance(module, Block):
            for branch in (module.attention.out, module.down):
                with torch.no_grad():
                    branch.weight /= math.sqrt(2 * self.layers)

    def pipeline_layers(self) -> list[nn.Module]:
        """The model as a chain, which is how it is cut into stages for `strategy: pipeline_parallel`."""
        return [self.embedding, *self.blocks, Head(self.norm, self.embedding)]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte: (batch, time) of int64 -> (batch, time, 256), with time <= context."""
        x = tokens
        for layer in self.pipeline_layers():
            x = layer(x)
        return x

    def pipeline_loss(self, logits: Tensor, window: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of predicting `window[:, 1:]`, of a batch or a part of it."""
        return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())

    def loss(self, window: Tensor) -> Tensor:
        """The same, predicted from `window[:, :-1]`."""
        return self.pipeline_loss(self(window[:, :-1]), window)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch of windows, (batch, context + 1) of int64."""
        loss = self.loss(batch)
        # This rank's share of the batch only: averaging over the ranks would cost an all-reduce every step.
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the loss on held-out files, averaged over the ranks."""
        loss = self.loss(batch)
        self.log("val/loss", loss, prog_bar=True, sync_dist=True, batch_size=len(batch))
        self.log("val/bits_per_byte", loss / math.log(2), sync_dist=True, batch_size=len(batch))

    def configure_optimizers(self) -> Any:
        """AdamW, with weight decay on matrices only; the learning rate follows the length of the whole run."""
        # By name, not by shape: a parameter that DeepSpeed has partitioned is flat.
        matrices = [p for name, p in self.named_parameters() if "norm" not in name]
        gains = [p for name, p in self.named_parameters() if "norm" in name]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": gains, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.99), fused=True)
        total = self.trainer.estimated_stepping_batches

        def scale(step: int) -> float:
            if step < self.warmup_steps:
                return (step + 1) / self.warmup_steps
            done = min(1.0, (step - self.warmup_steps) / max(1, total - self.warmup_steps))  # 0 if total is infinite
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, length: int, temperature: float = 1.0, seed: int = 0) -> bytes:
        """Continue `prompt` by `length` bytes, drawn from a generator of its own: the run's random state is untouched.

        Example:
            >>> len(GPT(layers=1, width=32, heads=2).generate(b"def ", length=10))
            14
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = torch.tensor([list(prompt)], device=self.device)
        training = self.training
        self.eval()
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1].float()
            choice = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, choice), dim=1)
        self.train(training)
        return bytes(tokens[0].tolist())
