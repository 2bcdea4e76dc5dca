"""Process groups, collectives, samplers, random state and clipping for any PyTorch loop. No Lightning.

`fairlead_distributed.testing.run_ranks` runs a function on several real processes, for tests.
"""

from fairlead_distributed._sampling import derive_seed
from fairlead_distributed.activation_checkpointing import (
    SelectiveGradientCheckpointing,
    checkpoint_layers,
    checkpoint_scope,
)
from fairlead_distributed.alarms import Alarm
from fairlead_distributed.collectives import (
    ReduceOp,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    reduce_scatter,
)
from fairlead_distributed.data_parallel import DistributedDataParallel, join
from fairlead_distributed.divergence import Divergence, first_divergence, replicated_tensors
from fairlead_distributed.errors import (
    AddressNotFoundError,
    AddressUnreachableError,
    AlreadyInitializedError,
    CollectiveError,
    CollectiveMismatchError,
    NonFiniteGradientError,
    NotInitializedError,
    PreflightError,
    RankFailedError,
    RendezvousError,
    TensorMismatchError,
)
from fairlead_distributed.evaluation import EvaluationSampler, SampleWeightedMean, weighted_mean
from fairlead_distributed.exact_reduction import register_exact_reduction
from fairlead_distributed.fully_sharded import AdvancedFSDPManager
from fairlead_distributed.gradients import clip_grad_norm, no_sync
from fairlead_distributed.info import (
    DistributedInfo,
    get_distributed_info,
    get_local_rank,
    get_rank,
    get_world_size,
    is_initialized,
    startup_lines,
)
from fairlead_distributed.learning_rate import apply_lr_factor
from fairlead_distributed.manager import MultiNodeTrainingManager
from fairlead_distributed.memory_pool import MemoryPool, memory_pool_scope
from fairlead_distributed.predictions.reading import Predictions
from fairlead_distributed.process_group import (
    destroy_process_group,
    group_store,
    init_process_group,
    process_group,
    rank_device,
    setup_distributed,
)
from fairlead_distributed.rng import isolated_rng, rng_state, set_rng_state
from fairlead_distributed.sampler import ResumableDistributedSampler
from fairlead_distributed.sampler import ResumableDistributedSampler as DistributedSampler
from fairlead_distributed.seeding import (
    SampleRNG,
    global_mean_std,
    sample_rng,
    seeded_split,
)
from fairlead_distributed.stacks import (
    dump_flight_recorder,
    dump_stacks,
    flight_recorder_variables,
    show_stacks_on_signal,
)
from fairlead_distributed.store import choose_port, tcp_store
from fairlead_distributed.stuck import RankWatch
from fairlead_launch.launcher import DistributedLauncher, launch_distributed_training
from fairlead_launch.ports import PortError, bind_listener, free_port
from fairlead_launch.settings import LaunchConfig
from fairlead_runs.batch_size import effective_batch, lr_factor, scale_lr, split_batch

__all__ = [
    "AddressNotFoundError",
    "AddressUnreachableError",
    "AdvancedFSDPManager",
    "Alarm",
    "AlreadyInitializedError",
    "CollectiveError",
    "CollectiveMismatchError",
    "DistributedDataParallel",
    "DistributedInfo",
    "DistributedLauncher",
    "DistributedSampler",
    "Divergence",
    "EvaluationSampler",
    "LaunchConfig",
    "MemoryPool",
    "MultiNodeTrainingManager",
    "NonFiniteGradientError",
    "NotInitializedError",
    "PortError",
    "Predictions",
    "PreflightError",
    "RankFailedError",
    "RankWatch",
    "ReduceOp",
    "RendezvousError",
    "ResumableDistributedSampler",
    "SampleRNG",
    "SampleWeightedMean",
    "SelectiveGradientCheckpointing",
    "TensorMismatchError",
    "all_gather",
    "all_reduce",
    "apply_lr_factor",
    "barrier",
    "bind_listener",
    "broadcast",
    "checkpoint_layers",
    "checkpoint_scope",
    "choose_port",
    "clip_grad_norm",
    "derive_seed",
    "destroy_process_group",
    "dump_flight_recorder",
    "dump_stacks",
    "effective_batch",
    "first_divergence",
    "flight_recorder_variables",
    "free_port",
    "get_distributed_info",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "global_mean_std",
    "group_store",
    "init_process_group",
    "is_initialized",
    "isolated_rng",
    "join",
    "launch_distributed_training",
    "lr_factor",
    "memory_pool_scope",
    "no_sync",
    "process_group",
    "rank_device",
    "reduce_scatter",
    "register_exact_reduction",
    "replicated_tensors",
    "rng_state",
    "sample_rng",
    "scale_lr",
    "seeded_split",
    "set_rng_state",
    "setup_distributed",
    "show_stacks_on_signal",
    "split_batch",
    "startup_lines",
    "tcp_store",
    "weighted_mean",
]
