"""URLs of stores, and what may not stand in one: a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from fairlead.errors import ConfigError
from fairlead.secret_names import is_secret_name
from fairlead_runs.commit.checkpoints import NAME

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(text: object) -> TypeGuard[str]:
    """Whether this names a place on a store and not a local path: `/data://x` is a path."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def check_url(url: str) -> str:
    """The URL without a slash at its end; `ConfigError`: it is none, names no place, or holds a user or a password."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"{url!r} is no URL", fix="write it as s3://bucket/prefix, gs://bucket/prefix, file:///path")
    protocol, rest = match[1].lower(), match[2]
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            "the URL of a store holds a user or a password",
            where=f"{protocol}://<redacted>@...",
            why="it would be written into the run directory",
            fix="leave it out; credentials come from the environment variables and files of the store's own library",
        )
    place = rest.rstrip("/")
    if not place.strip("/") and protocol != "memory":
        raise ConfigError(f"{url!r} names no place", fix=f"write it as {protocol}://bucket/prefix")
    if any(part in ("..", ".") for part in place.split("/")) or not place.isprintable():
        raise ConfigError(f"{url!r} has a `.`, a `..` or a control character in it", fix="write the whole name")
    return f"{protocol}://{place}"


def check_options(options: Mapping[str, Any], where: str = "storage_options") -> None:
    """Refuses options that carry a secret, at any depth, with a `ConfigError` that does not show it."""
    for name, value in options.items():
        if is_secret_name(str(name)) and value is not None:
            raise ConfigError(
                f"{name!r} is a secret and must not stand in a config",
                where=f"{where}.{name}",
                why="a config is shown and written into the run directory",
                fix="use the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS) or the files "
                "of the store's own library",
            )
        if isinstance(value, Mapping):
            check_options(value, f"{where}.{name}")


def join(url: str, *parts: str) -> str:
    """A place below a URL."""
    tail = "/".join(part.strip("/") for part in parts if part)
    return url + tail if url.endswith("://") else f"{url}/{tail}"


def split_checkpoint_url(url: str) -> tuple[str, str]:
    """The URL of the run and the checkpoint's name; a file in the checkpoint stands for it.

    Raises:
        ConfigError: It is not one of a checkpoint.

    Example:
        >>> split_checkpoint_url("s3://bucket/prefix/gpt/step-00000200/state.ckpt")
        ('s3://bucket/prefix/gpt', 'step-00000200')
    """
    clean = check_url(url)
    parts = clean.split("/")
    for end in (len(parts), len(parts) - 1):
        if NAME.fullmatch(parts[end - 1]):
            return "/".join(parts[: end - 1]), parts[end - 1]
    raise ConfigError(
        "this is not the URL of a checkpoint", where=clean, fix="name one, as s3://bucket/prefix/RUN/step-00000200"
    )
