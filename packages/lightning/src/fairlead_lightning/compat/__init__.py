"""Every use of a private part of Lightning, each with a contract test that fails when Lightning changes it."""

from __future__ import annotations

from fairlead_lightning.compat.averaging import keep_rates as keep_rates
from fairlead_lightning.compat.averaging import leaves_gradients as leaves_gradients
from fairlead_lightning.compat.averaging import resets_weights as resets_weights
from fairlead_lightning.compat.averaging import resume_averaging as resume_averaging
from fairlead_lightning.compat.checkpoint import between_epochs as between_epochs
from fairlead_lightning.compat.checkpoint import dump_checkpoint as dump_checkpoint
from fairlead_lightning.compat.checkpoint import inside_epoch as inside_epoch
from fairlead_lightning.compat.checkpoint import resume_from as resume_from
from fairlead_lightning.compat.checkpoint import set_root_dir as set_root_dir
from fairlead_lightning.compat.loaders import ends_with_longest as ends_with_longest
from fairlead_lightning.compat.loaders import evaluation_loaders as evaluation_loaders
from fairlead_lightning.compat.loaders import sharded as sharded
from fairlead_lightning.compat.loaders import take_prediction_loaders as take_prediction_loaders
from fairlead_lightning.compat.loaders import take_sharding as take_sharding
from fairlead_lightning.compat.logged import Logged as Logged
from fairlead_lightning.compat.logged import before_epoch_results as before_epoch_results
from fairlead_lightning.compat.logged import hold_logged as hold_logged
from fairlead_lightning.compat.logged import hold_metrics as hold_metrics
from fairlead_lightning.compat.logged import logged_for_epoch as logged_for_epoch
from fairlead_lightning.compat.logged import logged_state as logged_state
from fairlead_lightning.compat.logged import restore_logged as restore_logged
from fairlead_lightning.compat.logged import set_logged as set_logged
from fairlead_lightning.compat.loops import as_at as as_at
from fairlead_lightning.compat.loops import as_if_never_restored as as_if_never_restored
from fairlead_lightning.compat.loops import batches_of_epoch as batches_of_epoch
from fairlead_lightning.compat.loops import begin_next_epoch as begin_next_epoch
from fairlead_lightning.compat.loops import count_steps as count_steps
from fairlead_lightning.compat.loops import end_epoch_here as end_epoch_here
from fairlead_lightning.compat.loops import is_last_batch as is_last_batch
from fairlead_lightning.compat.loops import limit_epoch as limit_epoch
from fairlead_lightning.compat.loops import set_batches_done as set_batches_done
from fairlead_lightning.compat.loops import set_validation_requested as set_validation_requested
from fairlead_lightning.compat.loops import training_position as training_position
from fairlead_lightning.compat.loops import watch_boundaries as watch_boundaries
from fairlead_lightning.compat.loops import why_over as why_over
from fairlead_lightning.compat.trainer import is_spawned as is_spawned
from fairlead_lightning.compat.trainer import less_overhead as less_overhead
from fairlead_lightning.compat.trainer import let_children_end as let_children_end
from fairlead_lightning.compat.trainer import only_its_own_batch_hooks as only_its_own_batch_hooks
from fairlead_lightning.compat.trainer import signal_children as signal_children
from fairlead_lightning.compat.trainer import uncompiled as uncompiled
from fairlead_lightning.compat.trainer import without_signal_handlers as without_signal_handlers
