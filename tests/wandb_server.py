"""Stands for the server of Weights & Biases: keeps the rows of runs, lets them be resumed, and fails where it is told.

It answers what wandb 0.31 asks. Rows come with their place in the history, as they do to the real server: what is sent
twice after a lost answer stands there once.
"""

import contextlib
import http.server
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Any

HISTORY = "wandb-history.jsonl"
STATE_OF_A_NEW_RUN = {"id": "m", "name": "p", "entity": {"id": "i", "name": "e"}}


class Server(http.server.ThreadingHTTPServer):
    """Keeps runs by their id; `trouble` holds what happens to the deliveries of rows to come, one word each."""

    def __init__(self, trouble: Sequence[str]) -> None:
        self.trouble = list(trouble) or ["fine"]
        self.runs: dict[str, list[str]] = {}
        self.met: list[str] = []
        self.opened = 0
        self.is_over = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://127.0.0.1:{self.server_port}"

    def steps(self, name: str) -> list[int]:
        """Return the steps that a run's history holds."""
        return [json.loads(line)["_step"] for line in self.runs.get(name, [])]

    def next_trouble(self) -> str:
        """Take the word for the next delivery; the last one stands for all later ones."""
        word = self.trouble.pop(0) if len(self.trouble) > 1 else self.trouble[0]
        self.met.append(word)
        return word

    def recover(self) -> None:
        """Answer from now on; connections that hang are closed."""
        self.trouble = ["fine"]
        self.is_over.set()

    def handle_error(self, *_: Any) -> None:
        """Say nothing of connections that wandb itself has given up."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        if self.path.endswith("/file_stream"):
            return self.take_rows(self.path.split("/")[-2], body.get("files", {}).get(HISTORY))
        name = body["variables"].get("name")
        if "RunResumeStatus" in body["query"]:
            self.server.opened += 1
            return self.answer(200, {"model": STATE_OF_A_NEW_RUN | {"bucket": self.bucket(name)}})
        if "UpsertBucket" in body["query"]:
            is_new = self.server.runs.setdefault(name, []) == []
            return self.answer(200, {"upsertBucket": {"bucket": self.bucket(name), "inserted": is_new}})
        self.answer(404, None)

    def bucket(self, name: str) -> dict[str, Any] | None:
        """Return what a resumed run is told of itself, None where there is none."""
        if name not in self.server.runs:
            return None
        rows = self.server.runs[name]
        return {
            "id": f"b-{name}", "name": name, "displayName": name, "config": "{}", "tags": [], "notes": "",
            "project": {"id": "p", "name": "p", "entity": {"id": "i", "name": "e"}},
            "historyLineCount": len(rows), "eventsLineCount": 0, "logLineCount": 0,
            "historyTail": json.dumps(rows[-1:]), "eventsTail": "[]", "summaryMetrics": (rows or ["{}"])[-1],
            "wandbConfig": json.dumps({"t": 1}),
        }  # fmt: skip

    def take_rows(self, name: str, rows: dict[str, Any] | None) -> None:
        """Keep rows at their place, or fail before or after; deliveries without rows always succeed."""
        trouble = "fine" if rows is None else self.server.next_trouble()
        if trouble.isdigit():
            return self.answer(int(trouble), None)
        if trouble == "hangs":
            self.server.is_over.wait()
        if trouble in ("hangs", "closes", "resets"):
            return self.hang_up(trouble == "resets")
        if rows is not None:
            self.server.runs.setdefault(name, [])[rows["offset"] :] = rows["content"]
        self.answer(200, None, whole=trouble != "cuts")

    def answer(self, status: int, data: Any, whole: bool = True) -> None:
        body = json.dumps({"data": data}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if whole else body[: len(body) // 2])

    def hang_up(self, at_once: bool) -> None:
        """Close the connection without an answer; `at_once`: with a reset, as of a machine that has started anew."""
        if at_once:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def serving(*trouble: str) -> Iterator[Server]:
    """Serve in a thread.

    What happens to a delivery of rows: fine, closes, resets, hangs, an HTTP status, or cuts: the rows are kept, but
    half an answer is given.
    """
    with Server(trouble) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.is_over.set()
            server.shutdown()
            thread.join()
