"""The synchronised BatchNorm for CPUs in 16 bits: as torch's over the whole batch, which computes in 32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fairlead_distributed.testing import run_ranks
from fairlead_strategies.sync_batchnorm_runtime import CPUSyncBatchNormLayerSync

ROWS = 70_000  # more than float16 can count to
DTYPES = ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32))


def layer(dtype: torch.dtype) -> nn.Module:
    made = nn.Sequential(nn.BatchNorm1d(2)).to(dtype)
    nn.init.constant_(made.state_dict()["0.weight"], 2.0)
    return made


def normalised(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    (out.float() * (torch.arange(len(x)) % (ROWS // 2) / ROWS)[:, None]).sum().backward()
    assert x.grad is not None
    return {"out": out.detach(), "gradient": x.grad, **model.state_dict()}


def inputs(dtype: torch.dtype) -> Tensor:
    return (torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0)) * 3 + 5).to(dtype)


def on_two_ranks(rank: int) -> list[dict[str, Tensor]]:
    """The same rows on both, of which each gives half the batch."""
    sync = CPUSyncBatchNormLayerSync()
    return [normalised(sync.apply(layer(of)), inputs(dtype)[: ROWS // 2]) for dtype, of in DTYPES]


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Tensor]]]:
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("case", range(len(DTYPES)), ids=str)
def test_it_is_torchs_over_the_whole_batch(ranks: list[list[dict[str, Tensor]]], case: int) -> None:
    dtype, of = DTYPES[case]
    half = inputs(dtype)[: ROWS // 2]
    expected = normalised(layer(of), torch.cat([half, half]))
    for one in ranks:
        for name, found in one[case].items():
            theirs = expected[name][: len(half)] if found.ndim == 2 else expected[name]
            torch.testing.assert_close(found, theirs, rtol=0.01, atol=0.01)
