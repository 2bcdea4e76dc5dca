"""Whether this process can reach Weights & Biases, decided before `wandb.init` waits for it. Torch-free."""

from __future__ import annotations

import netrc
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

__all__ = ["can_connect", "wandb_mode"]

SERVER: Final = "https://api.wandb.ai"
TIMEOUT_S: Final = 3.0


def wandb_mode(
    asked: bool | None, environ: Mapping[str, str], *, connect: Callable[[str, Mapping[str, str]], bool] | None = None
) -> tuple[str, str]:
    """(`online`, `offline` or `disabled`, the reason).

    Args:
        asked: The config's `offline`.
        environ: The environment variables.
        connect: Whether a server answers; None: `can_connect`.

    Example:
        >>> wandb_mode(None, {"WANDB_MODE": "offline"})
        ('offline', 'WANDB_MODE=offline')
    """
    if asked is not None:
        return ("offline" if asked else "online"), "trainer.loggers: offline"
    mode = environ.get("WANDB_MODE", "").lower()
    if mode:
        known = {"dryrun": "offline", "run": "online", "online": "online", "disabled": "disabled"}
        return known.get(mode, "offline"), f"WANDB_MODE={mode}"
    server = environ.get("WANDB_BASE_URL", SERVER)
    if not _has_login(environ, urlsplit(server).hostname or ""):
        return "offline", "no WANDB_API_KEY, and no login in ~/.netrc"
    if not (connect or can_connect)(server, environ):
        return "offline", f"{server} does not answer"
    return "online", f"{server} answers"


def _has_login(environ: Mapping[str, str], host: str) -> bool:
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(environ.get("HOME", "/nonexistent"))
    named = environ.get("NETRC")
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        try:
            if netrc.netrc(path).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue  # wandb cannot log in with it either
    return False


def can_connect(server: str, environ: Mapping[str, str]) -> bool:
    """Whether a TCP connection to the server, or to the proxy before it, opens within three seconds."""
    proxy = environ.get("HTTPS_PROXY") or environ.get("https_proxy")
    url = urlsplit(proxy if proxy and "//" in proxy else f"//{proxy}" if proxy else server)
    port = url.port or (443 if url.scheme in {"https", ""} else 80)
    try:
        socket.create_connection((url.hostname or "", port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True
