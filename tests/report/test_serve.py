"""`fathoms watch`: one page, read-only, to this machine alone."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading

import pytest

from fathoms.cli.main import main
from fathoms.report.serve import LivePage, Server, is_loopback
from planted_comparison import GRID, write_comparison, write_run


@pytest.fixture
def folder(tmp_path):
    return write_comparison(tmp_path / "deep", GRID, epochs=2)


@pytest.fixture
def server(folder):
    made = Server("127.0.0.1", 0, LivePage([folder]))
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    host = headers.pop("host", f"127.0.0.1:{server.server_port}")
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_is_served_with_a_policy_and_a_tag(server):
    answer, body = ask(server)
    assert answer.status == 200
    assert b"<body data-live>" in body
    assert b"connect-src &#39;self&#39;" in body
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in answer.headers
    again, nothing = ask(server, If_None_Match=answer.headers["ETag"])
    assert (again.status, nothing) == (304, b"")
    head, nothing = ask(server, method="HEAD")
    assert (head.status, nothing, head.headers["Content-Length"]) == (200, b"", str(len(body)))


def test_a_changed_file_changes_the_page(server, folder):
    before, _ = ask(server)
    results = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps(results | {"answer": "something else leads"}))
    # A page is made at most every so often; the server says so by sending the old one.
    server.page._next = 0.0
    after, body = ask(server, If_None_Match=before.headers["ETag"])
    assert after.status == 200
    assert b"something else leads." in body


@pytest.mark.parametrize(
    "path", ["/plan.json", "/cells/", "/../plan.json", "/%2e%2e/plan.json", "/report.html"]
)
def test_nothing_but_the_page_is_served(server, path):
    answer, body = ask(server, path)
    assert answer.status == 404
    assert b"plan" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT"])
def test_only_get_and_head_are_answered(server, method):
    assert ask(server, method=method)[0].status == 501


@pytest.mark.parametrize(
    "host", ["evil.example:{}", "evil.example", None, "127.0.0.1.evil.example:{}", "127.0.0.1", ""]
)
def test_a_rebound_name_gets_nothing(server, host):
    answer, body = ask(server, host=None if host is None else host.format(server.server_port))
    assert answer.status == 421
    assert b"deep" not in body


def test_names_of_this_machine_are_answered(server):
    for host in ("localhost", "127.0.0.1", "LOCALHOST"):
        assert ask(server, host=f"{host}:{server.server_port}")[0].status == 200
    assert ask(server, host=f"10.0.0.7:{server.server_port}")[0].status == 421, "only loopback is open"


def test_an_open_interface_answers_to_addresses_and_not_to_names(folder):
    server = Server("0.0.0.0", 0, LivePage([folder]))
    port = server.server_port
    assert server.is_ours(f"10.0.0.7:{port}")
    assert server.is_ours(f"[fe80::1]:{port}")
    assert not server.is_ours(f"evil.example:{port}")
    server.server_close()
    assert [
        is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.7", "name")
    ] == [
        *(True, True, True),
        *(False, False, False),
    ]


def test_a_file_that_cannot_be_read_now_is_a_503_of_one_line(server, folder):
    (folder / "results.json").write_text("{")
    answer, body = ask(server)
    assert answer.status == 503
    assert b"results.json: not readable as JSON" in body
    assert b"\n" not in body


def test_the_command_serves_until_ctrl_c_and_then_exits_with_0(tmp_path):
    write_run(tmp_path / "run")
    words = [sys.executable, "-m", "fathoms", "watch", str(tmp_path / "run"), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/")
    answer = connection.getresponse()
    assert answer.status == 200
    assert b"<a href=" not in answer.read(), "files are not served, so there are no links to them"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    connection.close()
    assert (process.returncode, errors) == (0, "")


def test_another_interface_is_opened_only_with_a_warning(tmp_path):
    write_run(tmp_path / "run")
    words = [
        sys.executable,
        "-m",
        "fathoms",
        "watch",
        str(tmp_path / "run"),
        "--port",
        "0",
        "--host",
        "0.0.0.0",
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "serving http://0.0.0.0:" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert errors == "warning: anyone who reaches 0.0.0.0 can read this page\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port 70000"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1"),
        (["--host", "no.such.name.invalid"], "--host"),
    ],
)
def test_mistakes_are_errors_of_one_line(folder, capsys, flags, message):
    assert main(["watch", str(folder), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_folder_that_holds_nothing_is_refused_before_serving(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "has no config.toml" in capsys.readouterr().err
    assert main(["watch"]) == 2
