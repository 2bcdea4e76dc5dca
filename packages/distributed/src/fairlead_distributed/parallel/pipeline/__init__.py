"""Pipeline parallelism for any PyTorch loop: each rank holds some of the layers, and passes activations on."""

from fairlead_distributed.parallel.pipeline.between_stages import clip_grad_norm_over_stages
from fairlead_distributed.parallel.pipeline.pipeline import Pipeline
from fairlead_distributed.parallel.pipeline.splitting import (
    layer_costs,
    split_at,
    split_by_cost,
    split_by_counts,
)
from fairlead_distributed.parallel.pipeline.stage import PipelineStage

__all__ = [
    "Pipeline",
    "PipelineStage",
    "clip_grad_norm_over_stages",
    "layer_costs",
    "split_at",
    "split_by_cost",
    "split_by_counts",
]
