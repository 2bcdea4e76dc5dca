"""Tells Kubeflow Trainer how far a TrainJob is: `kubectl get trainjob` then shows its progress.

Where the cluster's operator has the feature gate `TrainJobStatus`, it sets three variables in the containers of a
TrainJob: the address of its status server, and the files of the certificate authority and the token. What is posted
there stands in the TrainJob's `.status.trainerStatus`. By its sources (kubeflow/trainer at 008666e):
`docs/proposals/2779-trainjob-progress`, `pkg/runtime/framework/plugins/trainjobstatus`, `pkg/statusserver/server.go`.
"""

from __future__ import annotations

import datetime
import http.client
import json
import math
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from fairlead_runs.redaction import redact_text

URL: Final = "KUBEFLOW_TRAINER_SERVER_URL"
CA_FILE: Final = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN_FILE: Final = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # the name of a variable that names a file
_INTERVAL_S: Final = 10.0
"""Seconds between two reports at least: the server limits them for all jobs of a service account together."""
_TIMEOUT_S: Final = 5.0
_MOST_METRICS: Final = 64  # the server takes 64 KiB
_INT32: Final = 2**31 - 1


@dataclass(frozen=True)
class StatusServer:
    """Where a TrainJob's status is told, and with what; the files change while the job runs."""

    url: str
    ca_file: Path
    token_file: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Self | None:
        """From the variables of the operator; None where they are not set, as in any other pod.

        Example:
            >>> StatusServer.of({}) is None
            True
        """
        url, ca, token = (environ.get(name, "").strip() for name in (URL, CA_FILE, TOKEN_FILE))
        return cls(url, Path(ca), Path(token)) if url and ca and token else None

    def post(self, status: Mapping[str, Any]) -> None:
        """Posts a `trainerStatus`; raises `OSError`, of which `urllib.error.URLError` and `ssl.SSLError` are kinds."""
        if not self.url.startswith("https://"):
            raise OSError(f"{URL} is not an https:// address, and the token must stay secret")
        request = urllib.request.Request(
            self.url,
            data=json.dumps({"trainerStatus": status}).encode(),
            headers={
                "Authorization": f"Bearer {self.token_file.read_text(encoding='utf-8').strip()}",
                "Content-Type": "application/json",
            },
            method="POST",
        )
        trust = ssl.create_default_context(cafile=str(self.ca_file))
        # The server is a service in the cluster: no proxy knows it.
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust), _NoRedirects()
        )
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                answer.read(1 << 16)
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(1 << 12).decode("utf-8", errors="replace")
            raise OSError(f"the server answered {error.code}: {body.strip()[:200] or error.reason}") from error


class TrainJobStatus:
    """Reports a run's progress from a thread of its own, so that no step waits for the network.

    A report that fails is dropped: the next one says more. `problem()` tells once why.

    Args:
        server: Where to.
        step: The step at which this start begins.
        interval_s: Seconds between two reports at least.

    Example:
        >>> server = StatusServer.of(os.environ)  # doctest: +SKIP
        >>> status = TrainJobStatus(server)  # doctest: +SKIP
        >>> status.tell(step=200, total=1000, metrics={"loss": "0.31"})  # doctest: +SKIP
        >>> status.close(finished=True)  # doctest: +SKIP
    """

    def __init__(self, server: StatusServer, *, step: int = 0, interval_s: float = _INTERVAL_S) -> None:
        self._server = server
        self._first, self._began = step, time.monotonic()
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._newest: dict[str, Any] | None = None
        self._last: dict[str, Any] = {}
        self._problem: str | None = None
        self._reported = False
        self._due = float("-inf")
        self._thread: threading.Thread | None = None

    def due(self) -> bool:
        """Whether it is time for another report; costs a look at the clock."""
        return time.monotonic() >= self._due

    def tell(self, step: int, total: int | None, metrics: Mapping[str, str | float]) -> None:
        """Hands over what is to be reported next; returns at once.

        Args:
            step: Steps done.
            total: Steps in all; None: not known, and so neither percentage nor remaining time.
            metrics: The newest value of each, at most 64 of them are reported.
        """
        now = time.monotonic()
        self._due = now + self._interval_s
        status: dict[str, Any] = {}
        if total:
            status["progressPercentage"] = min(100, max(0, 100 * step // total))
            if step > self._first:
                left = (now - self._began) / (step - self._first) * max(0, total - step)
                status["estimatedRemainingSeconds"] = min(_INT32, math.ceil(left))
        shown = list(metrics.items())[:_MOST_METRICS]
        status["metrics"] = [{"name": name, "value": str(value)} for name, value in shown if name and str(value)]
        self._last = status
        self._send(status)

    def problem(self) -> str | None:
        """Why the last report did not arrive, once."""
        if self._problem is None or self._reported:
            return None
        self._reported = True
        return self._problem

    def close(self, *, finished: bool) -> None:
        """Ends the reports; a finished run waits, for some seconds at most, until the last of them has arrived.

        One that is told to stop has better things to do with its time.
        """
        if finished and self._problem is None:
            self._send({**self._last, "progressPercentage": 100, "estimatedRemainingSeconds": 0})
            if (thread := self._thread) is not None:
                thread.join(2 * _TIMEOUT_S)

    def _send(self, status: dict[str, Any]) -> None:
        with self._lock:
            self._newest = status
            if self._thread is None:
                self._thread = threading.Thread(target=self._report, name="fairlead-trainjob", daemon=True)
                self._thread.start()

    def _report(self) -> None:
        while True:
            with self._lock:
                status, self._newest = self._newest, None
                if status is None:
                    self._thread = None
                    return
            now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            try:
                self._server.post({**status, "lastUpdatedTime": now})
                self._problem = None
            except (OSError, ValueError, http.client.HTTPException) as error:
                self._problem = redact_text(f"{type(error).__name__}: {error}")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token is for this server alone."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None
