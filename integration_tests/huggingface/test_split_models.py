"""Hugging Face's own models, split over two ranks, against themselves in one process."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fairlead_distributed.parallel.context import average_gradients, parallelize_context
from fairlead_distributed.parallel.tensor import parallelize_tensor
from fairlead_distributed.testing import run_ranks
from integration_tests.models import VOCABULARY, sample_tokens
from integration_tests.split_models import Compared, compare

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
WAYS = ["tensor", "tensor, sequence", "allgather", "ulysses"]
CASES = [(model, way) for model in ("Llama", "Qwen3", "GPT2") for way in WAYS] + [("Qwen2", "tensor")]


def made(name: str) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    if name == "GPT2":
        dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **GPT2_SIZES, **dropout)
        return transformers.GPT2LMHeadModel(config).double()  # type: ignore[no-any-return]
    more = {"head_dim": 4} if name == "Qwen3" else {}
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, use_cache=False, **SIZES, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).double()  # type: ignore[no-any-return]


def loss(model: nn.Module) -> Tensor:
    tokens = sample_tokens()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs)).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def split(way: str, mesh: DeviceMesh, model: nn.Module) -> None:
    if way.startswith("tensor"):
        parallelize_tensor(model, mesh, "auto", sequence_parallel="sequence" in way)
    else:
        method: Any = way
        parallelize_context(model, mesh, method=method)


def all_cases(rank: int) -> dict[str, Compared]:
    warnings.simplefilter("ignore")  # of what transformers imports
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))

    def finish(way: str, model: nn.Module) -> None:
        if not way.startswith("tensor"):
            average_gradients(model, mesh)

    return {
        f"{name}, {way}": compare(
            made(name),
            lambda model, way=way: split(way, mesh, model),  # type: ignore[misc]
            loss,
            after_backward=lambda model, way=way: finish(way, model),  # type: ignore[misc]
        )
        for name, way in CASES
    }


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Compared]]:
    return run_ranks(all_cases, 2, timeout=240, env={"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_split_model_equals_one_process(trained: list[dict[str, Compared]], name: str, way: str) -> None:
    for rank in trained:
        rank[f"{name}, {way}"].check()
