"""What is tried again when a store does not answer, and after how long."""

from __future__ import annotations

import errno
import logging
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fairlead.errors import CheckpointError, FairleadError
from fairlead_runs.redaction import redact_text

T = TypeVar("T")
log = logging.getLogger("fairlead_runs.remote")

_JITTER: Final = random.SystemRandom()  # the global generator is the training's

_PASSING: Final = {
    *(errno.EBUSY, errno.EIO, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.EPIPE),
    *(
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.ECONNABORTED,
        errno.ENETDOWN,
        getattr(errno, "EREMOTEIO", errno.EIO),
    ),
}
# The libraries of the stores, whose own errors are mostly of the network.
_LIBRARIES: Final = ("aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "azure", "adlfs", "requests", "urllib3")
_DRAWING: Final = ("botocore.retryhandler", "botocore.utils", "aiohttp.connector")
# Those of them that another try does not mend.
_LASTING: Final = (
    *("NoCredentials", "PartialCredentials", "Credential", "ProfileNotFound", "Token", "SSO", "Unauthorized"),
    *("ParamValidation", "InvalidRegion", "NoRegion", "UnknownService", "InvalidEndpoint", "DefaultCredentials"),
)


def leave_the_global_generator() -> None:
    """Has the stores' libraries that are loaded draw their waits from another generator: that one is the training's."""
    for name in _DRAWING:
        module: Any = sys.modules.get(name)
        if module is not None and module.random is random:
            module.random = _JITTER


@dataclass(frozen=True)
class Retries:
    """How often a request is made, and how long is waited in between.

    The wait, at most `first_s`, doubles each time up to `longest_s`, and a random part of it is left out, so that many
    jobs do not come back together. `sleep` waits; it raises to give up.
    """

    attempts: int = 8
    first_s: float = 1.0
    longest_s: float = 60.0
    sleep: Callable[[float], object] = time.sleep

    def __call__(self, what: str, url: str, call: Callable[[], T]) -> T:
        """Calls until it works; `call` must be harmless to do twice.

        Raises:
            CheckpointError: It failed in a way that does not pass, or too often.
            FileNotFoundError: There is no such object.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return call()
            except (FairleadError, FileNotFoundError):
                raise
            except Exception as error:  # each store has its own; what is no error of a store is raised below
                if not (isinstance(error, OSError) or _library(error)):
                    raise
                if not is_transient(error) or attempt == self.attempts:
                    raise store_error(error, what, url, attempt) from error
                pause = min(self.longest_s, self.first_s * 2 ** (attempt - 1)) * _JITTER.uniform(0.5, 1.0)
                log.info("%s: %s; trying again in %.1f s", url, _told(error), pause)
                self.sleep(pause)
        raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    """Whether the same request may work later: time-outs, resets, 5xx, "slow down"."""
    if isinstance(error, (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)):
        return False
    name = type(error).__name__
    if _library(error) and name.startswith(_LASTING):
        return False
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _PASSING
    return _library(error)


def store_error(error: BaseException, what: str, url: str, attempts: int = 1) -> CheckpointError:
    """The user's error for one of a store: where, why, and what to do."""
    tries = f" ({attempts} tries)" if attempts > 1 else ""
    return CheckpointError(f"cannot {what}", where=url, why=_told(error) + tries, fix=_advice(error))


def _told(error: BaseException) -> str:
    text = next(iter(str(error).strip().splitlines()), "")
    return redact_text(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _advice(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError) or "Credential" in name or "Token" in name or "Profile" in name:
        return (
            "check the credentials of this machine (AWS_ACCESS_KEY_ID, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS), "
            "and that they may list, read, write and delete there"
        )
    if isinstance(error, FileNotFoundError):
        return "make the bucket, or correct the URL"
    if is_transient(error):
        return "check the network of this machine and the store's address (AWS_ENDPOINT_URL)"
    return "check the URL and the settings of the store"


def _library(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _LIBRARIES or type(error).__name__ == "FSTimeoutError"
