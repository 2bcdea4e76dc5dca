"""As much of W&B's server as its own client needs to log a run, resume it, and upload records: on this machine."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PLACE = {"id": "P", "name": "p", "entity": {"id": "E", "name": "e"}}


class Server(ThreadingHTTPServer):
    """`rows` are the lines of each run's history, by run id and by the line's number as the client gives it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self.preempting: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed in the middle of a request is what these tests are about."""

    def history(self, run: str) -> list[Any]:
        """(`_step`, Lightning's step, the values) of each line."""
        lines = [line for _, line in sorted(self.rows.get(run, {}).items())]
        mine = [{k: v for k, v in line.items() if not k.startswith("_")} for line in lines]
        return [(line["_step"], own.pop("trainer/global_step"), own) for line, own in zip(lines, mine, strict=True)]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """To a GraphQL request."""
        run = str(variables.get("name"))
        bucket: dict[str, Any] = {"id": "ID", "name": run, "displayName": run, "config": "{}", "project": _PLACE}
        if operation == "UpsertBucket":
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "RunResumeStatus":
            lines = self.history(run)
            last = [line for _, line in sorted(self.rows.get(run, {}).items())][-1:]
            tail = json.dumps([json.dumps(line) for line in last])
            counts = {"historyLineCount": len(lines), "logLineCount": 0, "eventsLineCount": 0}
            more = {
                "historyTail": tail,
                "eventsTail": "[]",
                "summaryMetrics": json.dumps(last[0] if last else {}),
                "tags": [],
                "wandbConfig": '{"t":1}',
            }
            return {"model": {**_PLACE, "bucket": {**bucket, **counts, **more} if lines else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "ID", "uploadHeaders": [], "files": files}}
        if operation == "Viewer":
            return {"viewer": {"id": "V", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}}
        return {"serverInfo": {"features": []}}


class _Requests(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""

    def _reply(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_GET(self) -> None:
        """Nothing is there."""
        self._reply({})

    def do_PUT(self) -> None:
        """A file is uploaded."""
        self._body()
        self._reply({})

    def do_POST(self) -> None:
        """GraphQL, the stream of a run's lines, and telemetry."""
        raw = self._body()
        if self.headers.get("Content-Encoding") == "gzip":
            raw = gzip.decompress(raw)
        if self.path.endswith("/file_stream"):
            run, body = self.path.split("/")[-2], json.loads(raw)
            history = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            lines = self.server.rows.setdefault(run, {})
            lines.update(
                (history["offset"] + number, json.loads(line)) for number, line in enumerate(history["content"])
            )
            if body.get("preempting"):
                self.server.preempting.add(run)
            self._reply({})
        elif self.path.endswith("/graphql"):
            body = json.loads(raw)
            self._reply({"data": self.server.answer(body.get("operationName") or "", body.get("variables") or {})})
        else:
            self._reply({})


@contextmanager
def serving() -> Iterator[Server]:
    """A server, for a while."""
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
