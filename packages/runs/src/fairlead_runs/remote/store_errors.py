"""What a user is told where a store refuses or does not answer, after its own library has tried it again."""

from __future__ import annotations

import errno
import random
import sys
from typing import Any, Final

from fairlead.errors import CheckpointError, FairleadError
from fairlead_runs.redaction import redact_text

_PAUSES: Final = random.SystemRandom()  # the global generator is the training's
_DRAWING: Final = (
    *("botocore.retryhandler", "botocore.utils", "aiohttp.connector"),
    *("gcsfs.retry", "google.auth._exponential_backoff"),
)
# The libraries of the stores, whose own errors are mostly of the network.
_LIBRARIES: Final = ("aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "azure", "adlfs", "requests", "urllib3")
# Those of them that are about who asks, and what for.
_CREDENTIALS: Final = ("Credential", "Token", "Profile", "SSO", "Unauthorized")
_SETTINGS: Final = ("ParamValidation", "InvalidRegion", "NoRegion", "UnknownService", "InvalidEndpoint")


def leave_the_global_generator() -> None:
    """Has the stores' libraries that are loaded draw their waits from another generator: that one is the training's."""
    for name in _DRAWING:
        module: Any = sys.modules.get(name)
        if module is not None and module.random is random:
            module.random = _PAUSES


def is_of_a_store(error: Exception) -> bool:
    """Whether an error says something of a store, and none of ours has said it yet."""
    return not isinstance(error, FairleadError) and (isinstance(error, OSError) or _library(error))


def store_error(error: BaseException, what: str, url: str) -> CheckpointError:
    """The user's error for one of a store: where, why, and what to do."""
    return CheckpointError(f"cannot {what}", where=url, why=_reason(error), fix=_advice(error))


def _reason(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return redact_text(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _advice(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError) or any(word in name for word in _CREDENTIALS):
        return (
            "check the credentials of this machine (AWS_ACCESS_KEY_ID, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS), "
            "and that they may list, read, write and delete there"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    if isinstance(error, FileNotFoundError):
        return "make the bucket, or correct the URL"
    if isinstance(error, (FileExistsError, NotADirectoryError, IsADirectoryError)) or name.startswith(_SETTINGS):
        return "check the URL and the settings of the store"
    return "check the network of this machine and the store's address (AWS_ENDPOINT_URL)"


def _library(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _LIBRARIES or type(error).__name__ == "FSTimeoutError"
