"""One place on a store: its objects by their names below a URL."""

from __future__ import annotations

import base64
import contextlib
import copy
import importlib
import importlib.util
import inspect
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from fairlead.errors import ConfigError, MissingDependencyError
from fairlead.install import install_line
from fairlead_runs.commit.files import Content, ensure_dir, replace_file
from fairlead_runs.commit.syscalls import Syscalls
from fairlead_runs.remote.store_errors import is_of_a_store, leave_the_global_generator, store_error
from fairlead_runs.remote.urls import check_options, check_url, join

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

    The store's own library tries a request again that is not answered, and knows where credentials and the endpoint
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
        """Opens the place; nothing is asked of the store yet.

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
        """The place below this one."""
        child = copy.copy(self)
        child.url, child._root = join(self.url, name), f"{self._root}/{name}"
        return child

    def list(self) -> dict[str, Entry]:
        """All objects below this place, by name, in order; empty where there is none."""
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
        """Replaces a small object as a whole: whoever reads it meanwhile gets the old one or the new one."""
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
                places = [self._path(name) for name in files]
                self._fs.put([*map(str, files.values())], places, **self._together(at_a_time), **self._put_options)
                return
            for name, file in files.items():
                with file.open("rb") as source:
                    self._replace(name, partial(shutil.copyfileobj, source, length=MIB))

    def get(self, files: Mapping[str, Path], *, at_a_time: int = 8) -> None:
        """Downloads objects, by their names here, into files, so many at a time; their contents are not checked."""
        with self._asking("download an object", next(iter(files)) if len(files) == 1 else ""):
            places = [self._path(name) for name in files]
            self._fs.get(places, [*map(str, files.values())], **self._together(at_a_time))

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
        """A store answers when an object is durable, and whole; a file has to be told."""
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
    if importlib.util.find_spec("fsspec") is None:
        return MissingDependencyError(
            "checkpoints on an object store need the package fsspec, which is not installed",
            where=url,
            fix=install_line("remote"),
        )
    protocol = url.partition("://")[0]
    known = importlib.import_module("fsspec.registry").known_implementations
    package = _PACKAGES.get(protocol)
    if package is not None and importlib.util.find_spec(package) is None:
        return MissingDependencyError(
            f"URLs of {protocol}:// need the package {package}, which is not installed",
            where=url,
            fix=install_line("remote", package),
        )
    if protocol not in known and protocol not in importlib.import_module("fsspec").available_protocols():
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
