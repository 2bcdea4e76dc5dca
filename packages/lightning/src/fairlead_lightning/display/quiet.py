"""Silences exact messages of Lightning and its libraries that users cannot act on; torch-free."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

LOGGED: Final = (
    "💡 Tip: For seamless cloud logging and experiment tracking, try installing [litlogger]",
    "💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]",
    "GPU available: ",
    "TPU available: ",
    "HPU available: ",
    "Initializing distributed: GLOBAL_RANK",
    "Loaded model weights from the checkpoint at ",
    "Restored all states from the checkpoint at ",
    "Restoring states from the checkpoint path at ",
    "`Trainer.fit` stopped: `max_steps=",
    "`Trainer.fit` stopped: `max_epochs=",
)
"""How the log lines begin: advertisements, and what Fairlead itself says better."""

WARNED: Final = (
    r"The '\w+' does not have many workers which may be a bottleneck",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The `srun` command is available on your system but is not used",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)
"""How the warnings begin, as regular expressions: small data needs no workers; a matter between Lightning and torch; an
allocation that stays idle is a finding of ours, and a login node no mistake; a short epoch is logged as others are."""

TORCH_DEFAULTS: Final = {"TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_FR_BUFFER_SIZE": "2000"}
"""Set before torch is imported, unless the user has set them. Where a peer has gone torch's store would print frames of
C++, hundreds of lines on each rank, beside the one report that says which rank it was. And torch 2.9 would record none
of gloo's collectives."""

_LOGGERS: Final = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning_utilities.core.rank_zero",
)
_SUMMARY: Final = "lightning.pytorch.callbacks.model_summary"
_NO_FLOPS: Final = re.compile(r"\n0 +Total Flops")
_ENGINES: Final = r"(torch|torchmetrics|lightning|pytorch_lightning|lightning_fabric|lightning_utilities)(\.|$)"
_OF_THE_CODE: Final = (UserWarning, FutureWarning, DeprecationWarning)


def only_rank_0_warns() -> Callable[[], None]:
    """What torch and Lightning warn of in this rank, which is not the first, no longer shows. Returns the undo.

    All ranks run the same code, and rank 0 shows the same. What the user's code warns of shows on every rank, and who
    has set a filter for warnings of these kinds (`-W`, PYTHONWARNINGS) has the last word.
    """
    before = list(warnings.filters)
    for category in _OF_THE_CODE:
        warnings.filterwarnings("ignore", category=category, module=_ENGINES, append=True)
    added = [one for one in warnings.filters if one not in before]

    def undo() -> None:
        warnings.filters = [one for one in warnings.filters if one not in added]

    return undo


def _unknown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LOGGED)


def _without_zeros(record: logging.LogRecord) -> bool:
    """Takes a count that was never made out of Lightning's summary of the model."""
    record.msg = _NO_FLOPS.sub("", str(record.msg))
    return True


def hush() -> None:
    """From now on the known messages do not show in this process."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_unknown)
    logging.getLogger(_SUMMARY).addFilter(_without_zeros)
    for message in WARNED:
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def quiet() -> Iterator[None]:
    """While this is open, the known messages do not show."""
    try:
        with warnings.catch_warnings():
            hush()
            yield
    finally:
        for name in _LOGGERS:
            logging.getLogger(name).removeFilter(_unknown)
        logging.getLogger(_SUMMARY).removeFilter(_without_zeros)
