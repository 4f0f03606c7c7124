"""A server of ``trtllm-av-serve`` for as long as a benchmark needs it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trtllm_av.runtime.errors import UsageError


@dataclass
class RunningServer:
    """Addresses of a server that is ready; ``pid`` is tritonserver's, whose process group has the stubs."""

    http: str
    grpc: str
    metrics: str
    pid: int

    def metric(self, prefix: str) -> float:
        """The first sample on the metrics page that starts with ``prefix``."""
        with urllib.request.urlopen(f"http://{self.metrics}", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        for line in lines:
            if line.startswith(prefix):
                return float(line.rsplit(" ", 1)[1])
        raise UsageError(f"the server has no metric {prefix!r}; is it of this version?")

    def cpu_seconds(self) -> dict[str, float]:
        """What its processes took of the cores so far: the server itself, and its stubs together."""
        seconds = {"server": 0.0, "stubs": 0.0}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:  # it ended meanwhile
                continue
            if int(fields[2]) == self.pid:
                ticks = int(fields[11]) + int(fields[12])
                name = "server" if folder.name == str(self.pid) else "stubs"
                seconds[name] += ticks / os.sysconf("SC_CLK_TCK")
        return seconds


def free_ports(count: int) -> list[int]:
    """Ports of the loopback address that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def run_server(
    log: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[RunningServer]:
    """``trtllm-av-serve ARGUMENTS`` until the end of the block; its messages go to ``log``.

    ``environment`` is added to this process's.
    """
    ports = [str(port) for port in free_ports(3)]
    command = [
        sys.executable, "-m", "trtllm_av.triton_model_repo.serve", "--json", *arguments,
        "--http-port", ports[0], "--grpc-port", ports[1], "--metrics-port", ports[2],
    ]  # fmt: skip
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stream, text=True,
            env=os.environ | dict(environment or {}),
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise UsageError(f"the server did not start: {log.read_text()[-300:].strip()}")
        where = json.loads(line)
        yield RunningServer(where["http"], where["grpc"], where["metrics"], where["pid"])
    finally:
        process.terminate()
        process.wait(60)
