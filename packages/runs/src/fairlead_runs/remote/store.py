"""One URL of a store: its objects by their names below it; what a URL may hold, and how its errors are reported."""

from __future__ import annotations

import base64
import contextlib
import copy
import errno
import importlib
import importlib.util
import inspect
import os
import random
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeGuard

from fairlead.errors import CheckpointError, ConfigError, FairleadError, MissingDependencyError
from fairlead.install import install_line
from fairlead.secret_names import is_secret_name
from fairlead_runs.commit.checkpoints import NAME
from fairlead_runs.commit.files import Content, Syscalls, ensure_dir, replace_file
from fairlead_runs.redaction import redact_text

MIB: Final = 1 << 20
_S3: Final[Mapping[str, Any]] = {"connect_timeout": 10, "read_timeout": 60}  # a dead endpoint is noticed in seconds
_PACKAGES: Final = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


@dataclass(frozen=True)
class Entry:
    """One object, by its name below the store's URL.

    `checksum` is the store's own, where it gives one: an MD5 in hexadecimal, or S3's of several parts, `<md5>-<parts>`.
    """

    name: str
    size: int
    checksum: str | None = None


class Store:
    """The objects below a URL.

    The store's own library retries a request that is not answered, and knows where credentials and the endpoint
    are. What it gives up is a `CheckpointError`.

    Example:
        >>> store = Store.open("memory://docs/run")                                 # doctest: +SKIP
        >>> store.write("latest", b"step-00000200")                                 # doctest: +SKIP
    """

    def __init__(self, url: str, filesystem: Any, root: str, *, part_mib: int = 32) -> None:
        self.url = url
        self.part = part_mib * MIB
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._local = "file" in _protocols(filesystem)
        takes = inspect.signature(getattr(filesystem, "_put_file", filesystem.put_file)).parameters
        self._put_options = {"chunksize": self.part} if "chunksize" in takes else {}
        self._put_options |= {"max_concurrency": 2} if "max_concurrency" in takes else {}

    @classmethod
    def open(
        cls,
        url: str,
        options: Mapping[str, Any] | None = None,
        *,
        tries: int = 8,
        part_mib: int = 32,
    ) -> Store:
        """Opens the URL; nothing is requested from the store yet.

        Args:
            url: `s3://bucket/prefix`; any protocol of fsspec.
            options: For fsspec's file system, as `{"endpoint_url": ...}`; no secrets.
            tries: How often each request is made at S3, with pauses that double; other libraries have their own rule.
            part_mib: MiB of one part of a large object; two are in flight for each file.

        Raises:
            ConfigError: The URL or an option is wrong, or a secret.
            MissingDependencyError: fsspec, or the library of this protocol, is not installed.
        """
        url = check_url(url)
        given = dict(options or {})
        check_options(given)
        lacking = missing_library(url)
        if lacking is not None:
            raise lacking
        if url.startswith(("s3://", "s3a://")):
            # Not botocore's newer modes: their pauses draw from the global generator, which is the training's.
            retries = {"total_max_attempts": tries, "mode": "legacy"}
            given["config_kwargs"] = {**_S3, "retries": retries, **given.get("config_kwargs", {})}
        try:
            filesystem, root = importlib.import_module("fsspec.core").url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **given
            )
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(
                "the store cannot be opened", where=url, why=str(error), fix="check the URL and storage_options"
            ) from error
        except Exception as error:  # some libraries look for credentials here
            raise store_error(error, "open the store", url) from error
        leave_the_global_generator()
        return cls(url, filesystem, root, part_mib=part_mib)

    def at(self, name: str) -> Store:
        """A URL below this one."""
        child = copy.copy(self)
        child.url, child._root = join(self.url, name), f"{self._root}/{name}"
        return child

    def list(self) -> dict[str, Entry]:
        """All objects below this URL, by name, in order; empty where there is none."""
        with self._asking("list what is there"):
            self._fs.invalidate_cache()
            try:
                infos = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
            entries = (_entry(info, self._name(path)) for path, info in infos.items())
            return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None where there is none."""
        with self._asking("read an object", name), contextlib.suppress(FileNotFoundError):
            return bytes(self._fs.cat_file(self._path(name)))
        return None

    def chunks(self, name: str, size: int = 8 * MIB) -> Iterator[memoryview]:
        """The content of an object, piece by piece."""
        with self._asking("read an object", name), self._fs.open(self._path(name), "rb") as file:
            while data := file.read(size):
                yield memoryview(data)

    def write(self, name: str, content: bytes) -> None:
        """Replaces a small object atomically: whoever reads it meanwhile gets the old one or the new one."""
        with self._asking("write an object", name):
            if self._local:
                self._replace(name, content)
            else:
                self._fs.pipe_file(self._path(name), content)

    def put(self, files: Mapping[str, Path], *, at_a_time: int = 4) -> None:
        """Uploads files by their names here, so many at a time, a large one in parts.

        No thread is left behind that an interpreter would wait for at its end: a store may not answer for long.
        """
        with self._asking("write an object", next(iter(files)) if len(files) == 1 else ""):
            if not self._local:
                paths = [self._path(name) for name in files]
                self._fs.put([*map(str, files.values())], paths, **self._together(at_a_time), **self._put_options)
                return
            for name, file in files.items():
                with file.open("rb") as source:
                    self._replace(name, partial(shutil.copyfileobj, source, length=MIB))

    def get(self, files: Mapping[str, Path], *, at_a_time: int = 8) -> None:
        """Downloads objects, by their names here, into files, so many at a time; their contents are not checked."""
        with self._asking("download an object", next(iter(files)) if len(files) == 1 else ""):
            paths = [self._path(name) for name in files]
            self._fs.get(paths, [*map(str, files.values())], **self._together(at_a_time))

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; one that is gone already is no error."""
        for name in names:
            with self._asking("delete an object", name), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))
        if self._local:
            self._remove_empty()

    @contextmanager
    def _asking(self, what: str, name: str = "") -> Iterator[None]:
        """Says of an error of the store where it was, and what to do."""
        try:
            yield
        except Exception as error:  # each store has its own; what is no error of a store is raised as it is
            if not is_of_a_store(error):
                raise
            raise store_error(error, what, join(self.url, name)) from error

    def _together(self, count: int) -> dict[str, int]:
        return {"batch_size": count} if self._fs.async_impl else {}

    def _replace(self, name: str, content: Content) -> None:
        """A store answers when an object is durable, and complete; a file must be synced and renamed."""
        path = Path(self._path(name))
        ensure_dir(path.parent, Syscalls())
        replace_file(path, content)

    def _remove_empty(self) -> None:
        for folder, _, _ in os.walk(self._root, topdown=False):
            if folder != self._root and not os.listdir(folder):
                os.rmdir(folder)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _name(self, path: str) -> str:
        return path.lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")


def missing_library(url: str) -> MissingDependencyError | None:
    """What is to be installed before this URL can be opened, as an error; None: nothing. Imports nothing of it."""
    protocol = url.partition("://")[0]
    packages = ["fsspec", *([_PACKAGES[protocol]] if protocol in _PACKAGES else [])]
    if lacking := next((package for package in packages if importlib.util.find_spec(package) is None), None):
        return MissingDependencyError(
            f"URLs of {protocol}:// need the package {lacking}, which is not installed",
            where=url,
            fix=install_line("remote", *packages[1:]),
        )
    if protocol not in importlib.import_module("fsspec").available_protocols():
        return MissingDependencyError(
            f"fsspec knows no protocol {protocol!r}",
            where=url,
            fix="write s3://, gs://, az://, file:// or another of it",
        )
    return None


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _entry(info: Mapping[str, Any], name: str) -> Entry:
    return Entry(name, int(info.get("size") or 0), _checksum(info))


def _checksum(info: Mapping[str, Any]) -> str | None:
    """S3's ETag, Google's md5Hash, Azure's content_md5; nothing for file systems without one."""
    if isinstance(etag := info.get("ETag"), str):
        return etag.strip('"').lower()
    md5 = info.get("md5Hash") or (info.get("content_settings") or {}).get("content_md5")
    if isinstance(md5, str):
        return base64.b64decode(md5).hex()
    return bytes(md5).hex() if isinstance(md5, (bytes, bytearray)) else None


_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_url(text: object) -> TypeGuard[str]:
    """Whether this names a location on a store and not a local path: `/data://x` is a path."""
    return isinstance(text, str) and _URL.fullmatch(text) is not None


def check_url(url: str) -> str:
    """The URL without a slash at its end; `ConfigError`: it is none, has no path, or holds a user or a password."""
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
    path = rest.rstrip("/")
    if not path.strip("/") and protocol != "memory":
        raise ConfigError(f"{url!r} names no location", fix=f"write it as {protocol}://bucket/prefix")
    if any(part in ("..", ".") for part in path.split("/")) or not path.isprintable():
        raise ConfigError(f"{url!r} has a `.`, a `..` or a control character in it", fix="write the full name")
    return f"{protocol}://{path}"


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
    """The URL of a name below a URL."""
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


_PAUSES: Final = random.SystemRandom()  # the global generator is the training's
_DRAWING: Final = (
    *("botocore.retryhandler", "botocore.utils", "aiohttp.connector"),
    *("gcsfs.retry", "google.auth._exponential_backoff"),
)
# The libraries of the stores, whose own errors are mostly of the network.
_LIBRARIES: Final = ("aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "azure", "adlfs", "requests", "urllib3")
# Those of them that are about who asks, and what for.
_CREDENTIALS: Final = ("Credential", "Token", "Profile", "SSO", "Unauthorized")


def leave_the_global_generator() -> None:
    """Has the stores' libraries that are loaded draw their waits from another generator: that one is the training's."""
    for name in _DRAWING:
        module: Any = sys.modules.get(name)
        if module is not None and module.random is random:
            module.random = _PAUSES


def is_of_a_store(error: Exception) -> bool:
    """Whether an error says something of a store, and is none of ours yet."""
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
    if isinstance(error, FileNotFoundError):
        return "make the bucket, or correct the URL"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space"
    return "check the network of this machine, and the store's address (AWS_ENDPOINT_URL) and settings"


def _library(error: BaseException) -> bool:
    return type(error).__module__.partition(".")[0] in _LIBRARIES or type(error).__name__ == "FSTimeoutError"
