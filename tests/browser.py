"""A real Chromium, driven over its DevTools pipe with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
START = 60.0
"""Seconds that a busy machine may take for an answer."""


class NavigatedError(AssertionError):
    """The page went away before it had answered."""


class Browser:
    """One tab; keeps what the console says and what is requested."""

    def __init__(self, program):
        self.profile = tempfile.mkdtemp()
        # The browser reads commands from its descriptor 3 and answers on 4.
        theirs_in, self.out = os.pipe()
        self.inn, theirs_out = os.pipe()
        words = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--no-first-run",
        ]
        words += [
            "--remote-debugging-pipe",
            f"--user-data-dir={self.profile}",
            "--disable-background-networking",
        ]
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "browser", *words, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.buffer, self.count, self.session = b"", 0, None
        self.complaints, self.requests = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of one command; events that come meanwhile are kept."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                if "navigated" in answer.get("error", {}).get("message", ""):
                    raise NavigatedError(answer)
                assert "error" not in answer, answer
                return answer["result"]

    def receive(self):
        while b"\0" not in self.buffer:
            piece = os.read(self.inn, 1 << 20)
            assert piece, "the browser has ended"
            self.buffer += piece
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, method, params):
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("exception", {}).get("description", "?"))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value") for one in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])

    def evaluate(self, code):
        """The value of an expression in the page, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, address, width=1280, height=900, scheme="light", ready="true"):
        """Open a page at a size in a colour scheme, and wait until it is ready."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.complaints.clear()
        self.requests.clear()
        self.call("Page.navigate", url=address)
        self.wait(f"location.href !== 'about:blank' && document.readyState === 'complete' && {ready}")

    def wait(self, condition, seconds=START):
        """Wait until an expression holds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            # A page that reloads itself may do so in the middle of the question.
            with contextlib.suppress(NavigatedError):
                if self.evaluate(f"Boolean({condition})"):
                    return
            time.sleep(0.05)
        raise AssertionError(f"never: {condition}")

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, name):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def screenshot(self, path, whole=True):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        Path(path).write_bytes(base64.b64decode(shot))

    def close(self):
        with contextlib.suppress(AssertionError, OSError):
            self.session = None
            self.call("Browser.close")
        self.process.wait(timeout=20)
        os.close(self.inn)
        os.close(self.out)
        shutil.rmtree(self.profile, ignore_errors=True)


def start_browser():
    """A browser, or a skip that says why."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    return Browser(program)
