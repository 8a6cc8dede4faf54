"""A real Slurm of one node on this machine: munged, slurmctld and slurmd, started and ended by a test.

Needs root and Debian's slurm-wlm and munge. All that it writes is in its folder: key, socket, state and logs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scancel", "scontrol")
SEARCH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_SECONDS = 30
CPUS = 4


class CannotStartError(Exception):
    """Why there is no Slurm here; a reason to skip."""


@contextlib.contextmanager
def one_node_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster in `folder`; gives the environment in which Slurm's commands reach it."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=SEARCH) is None]
    if missing:
        raise CannotStartError(f"{missing[0]} is not installed (Debian: slurm-wlm, munge)")
    if os.getuid() != 0:
        raise CannotStartError("slurmd needs root")
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True)
    config = write_config(folder)
    # Jobs must not take a job around the tests for theirs.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    environment = {**inherited, "SLURM_CONF": str(config), "PATH": SEARCH}
    munge = folder / "munge"
    (munge / "key").write_bytes(os.urandom(1024))
    (munge / "key").chmod(0o400)
    files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for words in (
            ["munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files],
            ["slurmctld", "-D"],
            ["slurmd", "-D"],
        ):
            with (folder / f"{words[0]}.out").open("wb") as output:
                daemons.append(
                    subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT)
                )
            if words[0] == "munged":
                wait_for(lambda: (munge / "socket").exists(), daemons, folder)
        wait_for(lambda: "idle" in node_state(environment), daemons, folder)
        yield environment
    finally:
        # slurmd first: it starts nothing more; munged last: the others need it to the end.
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        # A job outlives slurmd.
        for pid in processes(config):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes(config: Path, *variables: str) -> dict[int, int]:
    """Processes of this cluster, each with its parent; those that also have `variables`, such as "A=1"."""
    wanted = {variable.encode() for variable in (f"SLURM_CONF={config}", *variables)}
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        # It may end at this moment.
        with contextlib.suppress(OSError):
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return found


def write_config(folder: Path) -> Path:
    """slurm.conf of a cluster that starts and requeues jobs without the usual pauses."""
    node = socket.gethostname().partition(".")[0]
    ports = free_ports(2)
    lines = {
        "ClusterName": "test",
        "SlurmctldHost": f"{node}(127.0.0.1)",
        "SlurmUser": "root",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "AuthType": "auth/munge",
        # A requeued job waits until its credential has expired, else for two minutes.
        "AuthInfo": f"socket={folder / 'munge' / 'socket'},cred_expire=5",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "ReturnToService": 2,
        "KillWait": 15,
        "SchedulerParameters": "sched_interval=2,batch_sched_delay=1",
        # More CPUs than the machine may have.
        "SlurmdParameters": "config_overrides",
    }
    nodes = f"NodeName={node} NodeAddr=127.0.0.1 CPUs={CPUS} RealMemory=1000 State=UNKNOWN\n"
    partition = f"PartitionName=test Nodes={node} Default=YES MaxTime=INFINITE State=UP\n"
    path = folder / "slurm.conf"
    path.write_text("".join(f"{key}={value}\n" for key, value in lines.items()) + nodes + partition)
    return path


def free_ports(number: int) -> list[int]:
    """Ports of the loopback that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def node_state(environment: dict[str, str]) -> str:
    """The state of the node as sinfo names it; empty while the controller starts."""
    command = ["sinfo", "--noheader", "--format", "%t"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def wait_for(ready, daemons, folder: Path) -> None:
    """Until `ready()`; a daemon that ends or takes too long is a reason with its last line."""
    until = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > until or any(daemon.poll() is not None for daemon in daemons):
            logs = [f"{log.stem}: {last_line(log)}" for log in sorted(folder.glob("*.out"))]
            raise CannotStartError(f"Slurm did not start ({'; '.join(logs)})")
        time.sleep(0.1)


def last_line(log: Path) -> str:
    """The last line of a log, shortened."""
    return (log.read_text(errors="replace").strip().splitlines() or ["no message"])[-1][:200]
