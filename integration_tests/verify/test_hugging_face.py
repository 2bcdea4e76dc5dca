"""`fairlead verify` on models of Hugging Face that no other test has: `nox -s transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration_tests.jobs import Call, fairlead

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

MODEL = """
import lightning.pytorch as L
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
MORE = {
    "Mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
    "GPTNeoX": {},
}


class Tokens(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, 61, (12,), generator=generator)
        return {"tokens": tokens}


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Tokens(), batch_size=4, shuffle=True)


class Model(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        sizes = SIZES | MORE[kind]
        config = getattr(transformers, f"{kind}Config")(use_cache=False, attn_implementation="sdpa", **sizes)
        self.model = getattr(transformers, f"{kind}ForCausalLM")(config)

    def forward(self, tokens):
        # Without a mask, transformers would take the parts of a split sequence for packed sequences.
        return self.model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits

    def pipeline_loss(self, logits, tokens):
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch, index):
        return self.pipeline_loss(self(batch["tokens"]), batch["tokens"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.001)


class Turned(torch.nn.Module):
    def __init__(self, layer, rotary):
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        out = self.layer(x, attention_mask=None, position_ids=places, position_embeddings=self.rotary(x, places))
        return out[0] if isinstance(out, tuple) else out


class Stages(Model):
    def pipeline_layers(self):
        base = self.model.model
        layers = [Turned(layer, base.rotary_emb) for layer in base.layers]
        return [base.embed_tokens, *layers, base.norm, self.model.lm_head]
"""
NEOX = "model.gpt_neox.layers.*.mlp.dense_"
STRATEGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"name": "ddp"}),
    "fsdp2": (2, {"name": "fsdp2"}),
    "tensor": (2, {"name": "tensor_parallel"}),
    "plan": (2, {"name": "tensor_parallel", "plan": {f"{NEOX}h_to_4h": "colwise", f"{NEOX}4h_to_h": "rowwise"}}),
    "hybrid": (4, {"name": "hybrid", "shard": 2, "tensor": 2}),
    "context": (2, {"name": "hybrid", "shard": 1, "context": 2}),
    "stage 2": (2, {"name": "deepspeed_stage_2"}),
    "stage 3": (2, {"name": "deepspeed_stage_3", "stage3_param_persistence_threshold": 0}),
}
"""Devices, and the strategy."""


def verified(folder: Path, kind: str, strategy: dict[str, Any], devices: int, model: str = "Model") -> Call:
    (folder / "mine.py").write_text(MODEL)
    job = {
        "run": {"name": "job", "seed": 1},
        "model": {"class": f"mine:{model}", "args": {"kind": kind}},
        "data": "mine:Data",
        "trainer": {
            "accelerator": "cpu",
            "devices": devices,
            "gradient_clip_val": 0.5,
            "accumulate_grad_batches": 2,
            "max_steps": 1000,
            "strategy": strategy,
        },
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    environ = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return fairlead("verify", "job.yaml", "--json", "--repeats", "2", cwd=folder, environ=environ)


MORE_CASES = [
    *(("Mistral", way) for way in STRATEGIES if way not in ("plan", "hybrid")),
    *(("Gemma", way) for way in ("hybrid", "stage 3")),
    ("GPTNeoX", "context"),
]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("Mistral", "hybrid"),
        ("GPTNeoX", "plan"),
        *(pytest.param(*case, marks=pytest.mark.full) for case in MORE_CASES),
    ],
)
def test_a_model_is_equal(tmp_path: Path, kind: str, way: str) -> None:
    devices, strategy = STRATEGIES[way]
    call = verified(tmp_path, kind, strategy, devices)
    assert call.code == 0, call.text
    found = json.loads(call.out)
    assert found["layout"]["ranks"] == devices
    assert found["alive"]["moved"] == found["compared"]["gradients"]["count"] > 30


@pytest.mark.full
@pytest.mark.parametrize(("kind", "schedule"), [("Mistral", "interleaved_1f1b"), ("Gemma", "1f1b")])
def test_a_model_in_stages_is_equal(tmp_path: Path, kind: str, schedule: str) -> None:
    """In one process it is the model's own forward; Gemma's embedding is its output matrix, too."""
    call = verified(tmp_path, kind, {"name": "pipeline_parallel", "schedule": schedule}, 2, "Stages")
    assert call.code == 0, call.text
    assert json.loads(call.out)["layout"]["mesh"] == {"pipeline": 2}
