"""Serve the page of a run or a comparison on this machine, refreshed while runs go on.

The same page as `fathoms report` writes, read-only, at http://127.0.0.1:8765/. Ctrl-C ends it. Nothing but the page
is served; on another machine, forward the port: ssh -L 8765:127.0.0.1:8765 HOST.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from fathoms.cli.flags.early_checks import check_report_folders
from fathoms.errors import ConfigError

EXAMPLES = """
fathoms watch runs/compare-digits-1a2b3c4d
fathoms watch runs --port 9000
"""


@dataclass(frozen=True)
class Args:
    """Folders, and where the page is served."""

    folders: tyro.conf.Positional[tuple[str, ...]]
    """A run folder, a comparison, a folder of runs, or several of them."""
    port: int = 8765
    """Port; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but loopback shows the page to the network, without a password."""


def run(args: Args) -> int:
    """Serve until Ctrl-C."""
    check_report_folders(args.folders)
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port}: use a number from 0 to 65535")
    from fathoms.report.serve import LivePage, Server, is_loopback

    page = LivePage([Path(folder) for folder in args.folders])
    page.get()
    try:
        server = Server(args.host, args.port, page)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--host {args.host} --port {args.port}: {reason}; use --port 0 for a free one"
        ) from error
    try:
        if not is_loopback(args.host):
            print(f"warning: anyone who reaches {args.host} can read this page", file=sys.stderr, flush=True)
        print(f"serving {server.url} until Ctrl-C", flush=True)
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
