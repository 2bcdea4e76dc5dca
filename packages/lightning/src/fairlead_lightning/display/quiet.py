"""Silences exact messages of Lightning and its libraries that nobody can act on; torch-free."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
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
)
"""How the warnings begin, as regular expressions: small data needs no workers; a matter between Lightning and torch; an
allocation that stays idle is a finding of ours, and a login node no mistake."""

_LOGGERS: Final = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.rank_zero",
    "lightning_utilities.core.rank_zero",
)


def _unknown(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LOGGED)


@contextmanager
def quiet() -> Iterator[None]:
    """While this is open, the known messages do not show."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(_unknown)
    try:
        with warnings.catch_warnings():
            for message in WARNED:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_unknown)
