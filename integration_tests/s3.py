"""A real S3 server on loopback, moto's, and a proxy before it that disturbs requests as networks and stores do."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

__all__ = ["S3", "Fault", "Faults", "s3_server"]

How = Literal["503", "500", "hang", "reset", "truncate", "flip"]
_LIMIT_S = 120.0


@dataclass
class Fault:
    """What is done to requests.

    Args:
        how: `503`, `500`: that answer. `hang`: none. `reset`: in the middle of the body. `truncate`, `flip`: half
            of the body is stored, or one bit of it is another, and the answer is that all is well.
        method: Of the request.
        path: A regular expression that is searched in its path.
        times: How often; more requests pass.
    """

    how: How
    method: str
    path: str
    times: int = 1

    def __post_init__(self) -> None:
        self.release = threading.Event()
        self.met = threading.Event()
        self.seen = 0


class Faults:
    """The faults that are to come, and all requests that came."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.requests: list[str] = []

    def add(self, how: How, method: str, path: str, times: int = 1) -> Fault:
        """One more."""
        fault = Fault(how, method, path, times)
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """All requests pass again."""
        with self._lock:
            faults, self._faults = self._faults, []
            self.requests.clear()
        for fault in faults:
            fault.release.set()

    def of(self, method: str, path: str) -> Fault | None:
        """The fault of a request, if it has one."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            for fault in self._faults:
                if fault.method == method and fault.seen < fault.times and re.search(fault.path, path):
                    fault.seen += 1
                    fault.met.set()
                    return fault
        return None


@dataclass
class S3:
    """A server that runs.

    Args:
        url: Through the proxy.
        faults: What the proxy does.
        direct: Past the proxy.
    """

    url: str
    faults: Faults
    direct: str

    def call(self, method: str, path: str, body: bytes | None = None) -> None:
        """A request past the proxy, without credentials."""
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.direct}/{path}", data=body, method=method, headers=headers)
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).close()

    def check_credentials_after(self, requests: float) -> None:
        """After so many more requests the server wants credentials that it knows; it knows none."""
        self.call("POST", "moto-api/reset-auth", str(requests).encode())

    @property
    def environ(self) -> dict[str, str]:
        """What points the AWS libraries to it, and keeps them from the credentials of this machine."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "hidden-secret-value",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "AWS_EC2_METADATA_DISABLED": "true",
            "no_proxy": "127.0.0.1",
        }


@contextmanager
def s3_server(folder: Path) -> Iterator[S3]:
    """Starts the server as a process of its own, with the proxy before it in a thread."""
    port = _free_port()
    with (folder / "moto.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}/moto-api/", folder / "moto.log")
            faults = Faults()
            proxy = _Proxy(("127.0.0.1", 0), port, faults)
            thread = threading.Thread(target=proxy.serve_forever, daemon=True)
            thread.start()
            try:
                yield S3(f"http://127.0.0.1:{proxy.server_address[1]}", faults, f"http://127.0.0.1:{port}")
            finally:
                faults.clear()
                proxy.shutdown()
                proxy.server_close()
        finally:
            server.kill()
            server.wait()


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], port: int, faults: Faults) -> None:
        super().__init__(address, _Handler)
        self.port = port
        self.faults = faults

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Proxy

    def _any(self) -> None:
        fault = self.server.faults.of(self.command, self.path)
        how = fault.how if fault is not None else None
        length = int(self.headers.get("Content-Length") or 0)
        if how == "reset":
            self.rfile.read(length // 2)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            return
        body = self.rfile.read(length)
        if fault is not None and how == "hang":
            fault.release.wait(_LIMIT_S)
            self.close_connection = True
            return
        if how in ("503", "500"):
            code, message = {
                "503": ("SlowDown", "Please reduce your request rate."),
                "500": ("InternalError", "We encountered an internal error."),
            }[how]
            text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self._answer(int(how), {"Content-Type": "application/xml"}, text)
            return
        if how == "truncate":
            body = body[: len(body) // 2]
        if how == "flip":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=_LIMIT_S)
        headers = {name: value for name, value in self.headers.items() if not _of_checksums(name, how)}
        headers["Content-Length"] = str(len(body))
        upstream.request(self.command, self.path, body, headers)
        answer = upstream.getresponse()
        self._answer(answer.status, dict(answer.getheaders()), answer.read())
        upstream.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any  # noqa: N815

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                self.send_header(name, value)
        length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: `Faults.requests` has them."""


def _of_checksums(name: str, how: str | None) -> bool:
    """A store that damages what it gets does not notice it by the client's checksum either."""
    damaged = how in ("truncate", "flip")
    return damaged and (name.lower().startswith("x-amz-checksum") or name.lower() == "content-md5")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while True:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).close()
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        else:
            return
