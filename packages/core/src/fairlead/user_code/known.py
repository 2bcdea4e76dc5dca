"""What is known by its name, so that its source need not be read."""

from __future__ import annotations

# Read by their names, not by their source: what they do to a class is part of the language; pydantic makes its
# `__init__` of fields, aliases and validators, which reading cannot follow.
KNOWN_MODULES = frozenset(
    [
        *("abc", "builtins", "collections", "contextlib", "dataclasses", "enum", "functools", "typing", "warnings"),
        "pydantic",
    ]
)
# Large files that nearly every model leads to.  They have no metaclass and change no signature of a
# class with an __init__ of its own, so they are read only when their own __init__ is what counts.
# Also: they may not be installed where `check` runs.
TRUSTED = frozenset(
    [
        *("torch.nn.Module", "torch.nn.modules.Module", "torch.nn.modules.module.Module"),
        *("torch.optim.Optimizer", "torch.optim.optimizer.Optimizer", "torch.utils.data.Dataset"),
        *("torch.utils.data.IterableDataset", "torch.utils.data.dataset.Dataset"),
        *(
            f"{package}.{name}"
            for package in ("lightning", "lightning.pytorch", "pytorch_lightning", "lightning.pytorch.core")
            for name in ("LightningModule", "LightningDataModule", "Callback")
        ),
        *("lightning.pytorch.core.module.LightningModule", "lightning.pytorch.core.datamodule.LightningDataModule"),
        *("lightning.pytorch.callbacks.Callback", "pytorch_lightning.callbacks.Callback"),
    ]
)
# What a job names of these is not looked for where torch is not: on a login node they are absent by design.
ENGINES = frozenset(
    [
        *("torch", "lightning", "pytorch_lightning", "torchmetrics", "torchvision", "torchaudio", "torchdata"),
        *("deepspeed", "transformers", "datasets", "accelerate", "bitsandbytes", "torch_geometric"),
    ]
)
# Packages whose own large file need not be read to know that these are modules.
TRUSTED_MODULES = frozenset(("torch.nn", "torch.optim", "torch.utils"))
