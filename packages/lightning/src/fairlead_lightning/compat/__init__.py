"""Every use of a private part of Lightning, each with a contract test that fails when Lightning changes it.

Lightning offers no public way to do these things; nothing else in Fairlead touches its private names.
"""

from __future__ import annotations

from fairlead_lightning.compat.callbacks import only_its_own_batch_hooks
from fairlead_lightning.compat.checkpoint import (
    between_epochs,
    dump_checkpoint,
    inside_epoch,
    resume_from,
    set_root_dir,
)
from fairlead_lightning.compat.loaders import evaluation_loaders, sharded, take_sharding
from fairlead_lightning.compat.logged import (
    Logged,
    before_epoch_results,
    hold_logged,
    hold_metrics,
    logged_for_epoch,
    logged_state,
    restore_logged,
    set_logged,
)
from fairlead_lightning.compat.loops import (
    Boundaries,
    as_if_never_restored,
    begin_next_epoch,
    set_batches_done,
    training_place,
    watch_boundaries,
)
from fairlead_lightning.compat.processes import is_spawned, let_children_end, signal_children, without_signal_handlers

__all__ = [
    "Boundaries",
    "Logged",
    "as_if_never_restored",
    "before_epoch_results",
    "begin_next_epoch",
    "between_epochs",
    "dump_checkpoint",
    "evaluation_loaders",
    "hold_logged",
    "hold_metrics",
    "inside_epoch",
    "is_spawned",
    "let_children_end",
    "logged_for_epoch",
    "logged_state",
    "only_its_own_batch_hooks",
    "restore_logged",
    "resume_from",
    "set_batches_done",
    "set_logged",
    "set_root_dir",
    "sharded",
    "signal_children",
    "take_sharding",
    "training_place",
    "watch_boundaries",
    "without_signal_handlers",
]
