"""Made the folders beside this file, with DeepSpeed 0.19.8 on two CPU ranks.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 record.py 2 zero2

DeepSpeed compiles C++ for minutes before its first run, so tests read what was recorded.
"""

from __future__ import annotations

import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param

stage, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for step in range(3):
    torch.manual_seed(step)
    loss = engine(torch.randn(2, 4)).square().mean()
    engine.backward(loss)
    engine.step()
# What Lightning's strategy gives DeepSpeed besides the model.
client = {"epoch": 1, "global_step": 3, "pytorch-lightning_version": "2.6.6"}
engine.save_checkpoint(folder, tag="checkpoint", client_state=client)
expected = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
if dist.get_rank() == 0:
    torch.save(expected, f"{folder}/expected.pt")
