"""Serve the report page of a folder on loopback, made anew when its files change.

Only the page is served. A page of another site cannot read it: the Host header must name this machine, which defeats
DNS rebinding, and no other origin is allowed to embed or fetch it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fathoms.errors import FathomsError, printable
from fathoms.report.page import render

WATCHED = (
    "plan.json",
    "results.json",
    "timings.json",
    "tuning.json",
    "config.toml",
    "metrics.jsonl",
    "summary.json",
)
WATCHED += ("probe.jsonl", "failed.json", "updates.jsonl", "guard.jsonl", "evaluation.json", "examples.json")
REST = 4
"""Making pages takes at most one part in this many of the time."""
TIMEOUT = 20
"""Seconds that a silent client may hold a thread."""


class LivePage:
    """The page of some folders; `get` makes it anew where files have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[int, int]] | None = None
        self._page, self._tag, self._next = b"", "", 0.0

    def get(self) -> tuple[bytes, str]:
        """The page and a tag that changes with it."""
        with self._lock:
            seen = self._files()
            if seen != self._seen and time.monotonic() >= self._next:
                began = time.monotonic()
                page = render(self.folders, live=True).encode(errors="replace")
                self._page, self._tag = page, f'"{hashlib.sha256(page).hexdigest()[:32]}"'
                self._seen = seen
                self._next = time.monotonic() + (REST - 1) * (time.monotonic() - began)
            return self._page, self._tag

    def _files(self) -> dict[str, tuple[int, int]]:
        """Sizes and times of the files that the page shows."""
        found: dict[str, tuple[int, int]] = {}
        for folder in self.folders:
            for path in (folder, *folder.glob("*"), *folder.glob("cells/*")):
                for name in WATCHED:
                    try:
                        about = (path / name).stat()
                    except OSError:
                        continue
                    found[str(path / name)] = (about.st_mtime_ns, about.st_size)
        return found


class Server(ThreadingHTTPServer):
    """An HTTP server for one page."""

    daemon_threads = True

    def __init__(self, host: str, port: int, page: LivePage) -> None:
        # Decided before the socket is made; the base class reads it from the instance.
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host, self.page = host, page
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_port}/"

    def is_ours(self, header: str | None) -> bool:
        """Whether a Host header names this machine.

        A rebound name is the attacker's own, so only names of this machine pass. An address cannot be rebound; it
        passes where other interfaces are open.
        """
        name, _, port = (header or "").rpartition(":")
        if port != str(self.server_port):
            return False
        name = name.lower()
        if name in ("localhost", "127.0.0.1", "[::1]", self.host.lower()):
            return True
        return not is_loopback(self.host) and (_is_address(name) or name == socket.gethostname().lower())


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of `/`, and nothing else."""

    server: Server  # pyrefly: ignore
    server_version, sys_version = "fathoms", ""
    protocol_version = "HTTP/1.1"
    timeout = TIMEOUT

    def do_GET(self) -> None:
        """Send the page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Send the headers of the page."""
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        if not self.server.is_ours(self.headers.get("Host")):
            return self._send(421, b"this server answers only to its own name\n", with_body=with_body)
        if self.path.partition("?")[0] != "/":
            return self._send(404, b"only the page is served\n", with_body=with_body)
        try:
            page, tag = self.server.page.get()
        except (FathomsError, OSError) as error:
            # A file may be read while it is written; the next request finds it whole.
            return self._send(503, printable(str(error)).encode(errors="replace"), with_body=with_body)
        if self.headers.get("If-None-Match") == tag:
            return self._send(304, b"", tag, with_body)
        return self._send(200, page, tag, with_body, "text/html; charset=utf-8")

    def _send(
        self,
        status: int,
        body: bytes,
        tag: str = "",
        with_body: bool = True,
        kind: str = "text/plain; charset=utf-8",
    ) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        if status >= 400:
            # A body that was sent with the request is not read; what follows it is not a request.
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def is_loopback(host: str) -> bool:
    """Whether an address or name is of this machine alone."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return True
