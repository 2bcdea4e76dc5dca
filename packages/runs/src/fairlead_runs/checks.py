"""The checks of every job: its run directory, its batch, how its data are loaded, and the device it is for."""

from __future__ import annotations

from fairlead.plugin_classes import CheckPlugin

run_directory = CheckPlugin("fairlead_runs.run_check:check_run_directory", reads_run=True)
batch = CheckPlugin(
    "fairlead_runs.batch_check:check_batch",
    reads_run=True,
    codes={
        "batch-size": "The batch size of the job cannot be read, or not be shared by its ranks.",
        "batch-not-split": "One process drives several devices, and its batch cannot be split evenly over them.",
    },
)
loaders = CheckPlugin(
    "fairlead_runs.loader_check:check_loaders",
    codes={
        "workers-too-many": "The loaders of a node's ranks have more workers than the node has CPUs for them.",
        "workers-none": "A GPU trains, and its batches are loaded by the process that drives it.",
        "memory-not-pinned": "A GPU trains, and its batches come from memory that is not pinned.",
    },
)
device = CheckPlugin(
    "fairlead_runs.device_models:check_device",
    codes={
        "device-unknown": "`resources.device` is no device that is known.",
        "device-not-driven": "`resources.device` is known, and Fairlead has no accelerator for it.",
    },
)
