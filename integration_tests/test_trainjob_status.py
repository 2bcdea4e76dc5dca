"""Progress in a TrainJob's status, told to a real HTTPS server with a certificate authority of its own.

The server stands for that of Kubeflow Trainer's operator: it takes what `pkg/statusserver/server.go` takes, where
`UpdateTrainJobStatusRequest` is the published model, and refuses with the same codes.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

from fairlead_runs.trainjob import StatusServer, TrainJobStatus
from integration_tests.jobs import JOB, changed, fairlead, repository

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/research/trainjobs/sine-1/status"


def certificates(folder: Path) -> tuple[Path, Path]:
    """A certificate authority, and a certificate with its key for 127.0.0.1 from it."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a CA of this test")])
    now = datetime.datetime.now(datetime.UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]

    def signed(subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: Any, critical: bool) -> bytes:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(hours=1)).add_extension(extension, critical)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(keys[0].public_key())
        builder = builder.add_extension(authority, False)
        if subject == name:
            builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, True)
        return builder.sign(keys[0], hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    ca, server = folder / "ca.crt", folder / "server.pem"
    ca.write_bytes(signed(name, keys[0], x509.BasicConstraints(ca=True, path_length=None), True))
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "the server of this test")])
    pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    server.write_bytes(signed(own, keys[1], here, False) + keys[1].private_bytes(*pem))
    return ca, server


@dataclass
class StandIn:
    """The stand-in for the operator's server, and what it has taken."""

    url: str
    folder: Path
    taken: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    answers: Callable[[BaseHTTPRequestHandler], bool] = lambda handler: False
    """Answers otherwise than the operator would; False: it did not."""

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the operator sets."""
        names = {"SERVER_URL": self.url, "SERVER_CA_CERT": "ca.crt", "SERVER_TOKEN": "token"}
        return {
            f"KUBEFLOW_TRAINER_{name}": value if value.startswith("http") else str(self.folder / value)
            for name, value in names.items()
        }

    def status(self, **options: Any) -> TrainJobStatus:
        """A reporter with these variables."""
        server = StatusServer.of(self.environ)
        assert server is not None
        return TrainJobStatus(server, **options)

    def until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not there():
            assert time.monotonic() < deadline, self.taken
            time.sleep(0.01)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[StandIn]:
    ca, certificate = certificates(tmp_path)
    assert ca.name == "ca.crt"
    (tmp_path / "token").write_text("first-token\n")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            stand_in.tokens.append(self.headers["Authorization"].removeprefix("Bearer "))
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if stand_in.answers(self):
                return
            if self.path != PATH:
                answer(self, 404, {"kind": "Status", "message": "Not found"})
                return
            read = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
            assert read is not None
            stand_in.taken.append(body["trainerStatus"])
            answer(self, 200, read.to_dict())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    # In the handler's own thread, so that a client that gives up does not end the server's loop.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that refuses the certificate
    stand_in = StandIn(f"https://127.0.0.1:{server.server_address[1]}{PATH}", tmp_path)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield stand_in
    server.shutdown()
    server.server_close()


def answer(handler: BaseHTTPRequestHandler, code: int, body: object, **headers: str) -> None:
    handler.send_response(code)
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(json.dumps(body).encode())


def rules_of_the_api(status: dict[str, Any]) -> None:
    """What the TrainJob's CRD checks beyond types (`trainjob_types.go`)."""
    assert 0 <= status.get("progressPercentage", 0) <= 100
    assert 0 <= status.get("estimatedRemainingSeconds", 0) < 2**31
    assert all(one["name"] and one["value"] for one in status["metrics"])
    told = datetime.datetime.fromisoformat(status["lastUpdatedTime"])
    assert abs(datetime.datetime.now(datetime.UTC) - told) < datetime.timedelta(minutes=1)


def test_progress_is_told_as_the_api_says(operator: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Percentage, remaining seconds and metrics; a token that was exchanged meanwhile is read anew."""
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # the server is in the cluster
    status = operator.status(interval_s=0.05)
    status.tell(0, 200, {})
    operator.until(lambda: len(operator.taken) == 1)
    assert not status.due()
    time.sleep(0.06)
    assert status.due()
    (operator.folder / "token").write_text("second-token\n")
    status.tell(50, 200, {"loss": "0.25", "": "1", "empty": "", "lr": 1e-3, **{f"m{i}": i for i in range(99)}})
    operator.until(lambda: len(operator.taken) == 2)
    status.tell(120, None, {"loss": float("nan")})
    operator.until(lambda: len(operator.taken) == 3)
    status.close(finished=True)
    begun, later, unknown, end = operator.taken
    assert (begun["progressPercentage"], "estimatedRemainingSeconds" in begun) == (0, False)
    assert later["progressPercentage"] == 25
    assert later["estimatedRemainingSeconds"] >= 1
    assert later["metrics"][:2] == [{"name": "loss", "value": "0.25"}, {"name": "lr", "value": "0.001"}]
    assert len(later["metrics"]) <= 64
    assert "progressPercentage" not in unknown
    assert (end["progressPercentage"], end["estimatedRemainingSeconds"]) == (100, 0)
    for one in operator.taken:
        rules_of_the_api(one)
    assert operator.tokens == ["first-token", "second-token", "second-token", "second-token"]
    assert status.problem() is None


def refuses(handler: BaseHTTPRequestHandler) -> bool:
    answer(handler, 403, {"kind": "Status", "message": "Forbidden"})
    return True


def sends_elsewhere(handler: BaseHTTPRequestHandler) -> bool:
    answer(handler, 302, {}, Location=f"{PATH}/2")
    return True


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("refused", "the server answered 403: .*Forbidden"),
        ("another CA", "CERTIFICATE_VERIFY_FAILED"),
        ("no token", "No such file or directory"),
        ("nobody there", "refused"),
        ("elsewhere", "the server answered 302"),
        ("not encrypted", "is not an https:// address"),
    ],
)
def test_what_goes_wrong_is_said_once_and_delays_nothing(case: str, told: str, operator: StandIn) -> None:
    if case == "refused":
        operator.answers = refuses
    elif case == "another CA":
        (operator.folder / "other").mkdir()
        certificates(operator.folder / "other")[0].rename(operator.folder / "ca.crt")
    elif case == "no token":
        (operator.folder / "token").unlink()
    elif case == "nobody there":
        operator.url = f"https://127.0.0.1:9{PATH}"
    elif case == "elsewhere":
        operator.answers = sends_elsewhere
    else:
        operator.url = operator.url.replace("https", "http")
    status = operator.status(interval_s=0.01)
    problems: list[str] = []

    def problem() -> bool:
        problems.extend(filter(None, [status.problem()]))
        return bool(problems)

    began = time.monotonic()
    status.tell(1, 10, {})
    assert time.monotonic() - began < 4  # sooner than a report that does not arrive
    operator.until(problem)
    assert re.search(told, problems[0]), problems
    status.tell(2, 10, {})
    began = time.monotonic()
    status.close(finished=True)  # what failed before is not waited for
    assert time.monotonic() - began < 4  # sooner than a report that does not arrive
    assert status.problem() is None
    assert operator.taken == []
    assert "first-token" not in problems[0]
    assert len(operator.tokens) <= 3  # none where the answer points to


def test_a_server_that_hangs_holds_nobody_up(operator: StandIn) -> None:
    """Neither a step nor a stop, which has to save."""
    hanging, over = threading.Event(), threading.Event()

    def hangs(handler: BaseHTTPRequestHandler) -> bool:
        hanging.set()
        return over.wait(60)

    operator.answers = hangs
    status = operator.status(interval_s=0.01)
    began = time.monotonic()
    for step in range(100):
        status.tell(step, 100, {"loss": "1"})
    operator.until(hanging.is_set)
    status.tell(99, 100, {})
    status.close(finished=False)
    over.set()
    assert time.monotonic() - began < 4  # sooner than a report is given up


@pytest.mark.full
def test_a_fit_in_a_trainjob(operator: StandIn, tmp_path: Path) -> None:
    """Without a setting; where the server is gone, the fit says so once and ends as it would."""
    trainer = {"devices": 1, "strategy": "auto", "max_steps": 6}
    job = str(repository(tmp_path / "user", job=changed(JOB, trainer=trainer)))
    told = fairlead("fit", job, cwd=tmp_path, environ=operator.environ)
    assert told.code == 0, told.text
    assert "TrainJob" not in told.text
    for one in operator.taken:
        rules_of_the_api(one)
    assert [operator.taken[0]["progressPercentage"], operator.taken[-1]["progressPercentage"]] == [0, 100]
    assert "train/loss" in {metric["name"] for metric in operator.taken[-1]["metrics"]}
    operator.url = f"https://127.0.0.1:9{PATH}"
    alone = fairlead(
        "fit", job, "--set", "run.name=again", "--set", "trainer.max_steps=12", cwd=tmp_path, environ=operator.environ
    )
    assert alone.code == 0, alone.text
    assert alone.text.count("the TrainJob's status does not show the progress") == 1
    assert "Connection refused" in alone.text
