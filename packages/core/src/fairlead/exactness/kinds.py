"""The classes and packages that are known by name: what runs at run time decides what they do to exactness."""

from __future__ import annotations

from typing import Final

__all__ = [
    "CALLBACKS",
    "COMBINED",
    "DATALOADERS",
    "ITERABLE_DATASETS",
    "KNOWN_PACKAGES",
    "MAP_DATASETS",
    "MODULES",
    "OPTIMIZERS",
    "REDRAWN_SAMPLERS",
    "STATEFUL_LOADERS",
    "WRAPPING_DATASETS",
    "is_known",
]


def _torch(module: str, *names: str) -> frozenset[str]:
    """The names in torch.utils.data, and where they are defined."""
    return frozenset(f"torch.utils.data.{part}{name}" for name in names for part in ("", *module.split()))


DATALOADERS: Final = _torch("dataloader.", "DataLoader")
STATEFUL_LOADERS: Final = frozenset(
    f"torchdata.stateful_dataloader.{part}StatefulDataLoader" for part in ("", "stateful_dataloader.")
)
COMBINED: Final = frozenset(
    f"{package}.utilities.{part}CombinedLoader"
    for package in ("lightning.pytorch", "pytorch_lightning")
    for part in ("", "combined_loader.")
)
# Drawn again from a seed of the epoch.
REDRAWN_SAMPLERS: Final = _torch(
    "sampler. distributed.",
    "RandomSampler",
    "SequentialSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "DistributedSampler",
)
ITERABLE_DATASETS: Final = _torch("dataset. datapipes.datapipe.", "IterableDataset", "ChainDataset", "IterDataPipe")
MAP_DATASETS: Final = _torch("dataset.", "Dataset", "TensorDataset", "Subset", "ConcatDataset", "StackDataset")
# They hold others, as their first argument; StackDataset holds all of its arguments.
WRAPPING_DATASETS: Final = _torch("dataset.", "Subset", "ConcatDataset", "StackDataset") | {
    "fairlead_distributed.SeededSamples"
}
MODULES: Final = frozenset(
    [
        *("torch.nn.Module", "torch.nn.modules.Module", "torch.nn.modules.module.Module"),
        *(f"{package}.LightningModule" for package in ("lightning", "lightning.pytorch", "pytorch_lightning")),
        *("lightning.pytorch.core.LightningModule", "lightning.pytorch.core.module.LightningModule"),
    ]
)
CALLBACKS: Final = frozenset(
    [
        *(f"{package}.Callback" for package in ("lightning", "lightning.pytorch", "pytorch_lightning")),
        *(f"{package}.callbacks.Callback" for package in ("lightning.pytorch", "pytorch_lightning")),
        "lightning.pytorch.callbacks.callback.Callback",
    ]
)
OPTIMIZERS: Final = frozenset(("torch.optim.Optimizer", "torch.optim.optimizer.Optimizer"))

# They keep no random generator of their own: what they draw comes from the global generators.
KNOWN_PACKAGES: Final = frozenset(
    [
        *("torch", "torchaudio", "torchdata", "torchmetrics", "torchvision", "lightning", "lightning_fabric"),
        *("lightning_utilities", "pytorch_lightning", "fairlead", "fairlead_distributed", "fairlead_lightning"),
        *(
            "numpy",
            "scipy",
            "sklearn",
            "pandas",
            "pyarrow",
            "h5py",
            "zarr",
            "lmdb",
            "PIL",
            "cv2",
            "imageio",
            "tifffile",
        ),
        *("soundfile", "nibabel", "pydicom", "xarray", "tokenizers", "safetensors", "yaml", "omegaconf", "pydantic"),
        *("einops", "jaxtyping", "tqdm", "rich", "fsspec", "msgpack", "orjson", "packaging", "typing_extensions"),
        *("matplotlib", "hparams"),
    ]
)
_EXCEPTIONS: Final = ("scipy.stats", "cv2.rand", "cv2.theRNG", "torch.hub", "torchdata.datapipes", "torchdata.nodes")


def is_known(name: str, standard: frozenset[str]) -> bool:
    """Whether something of a package is known to keep no random generator of its own.

    Args:
        name: Its full name.
        standard: The modules of Python's standard library.
    """
    top = name.partition(".")[0]
    return (top in KNOWN_PACKAGES or top in standard or top == "builtins") and not name.startswith(_EXCEPTIONS)
