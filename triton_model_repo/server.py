"""One tritonserver process: found, started, waited for, ended, and cleaned up behind.

Invariants: only processes and shared memory of this run are ended or removed: they are told apart by a
process group and a name prefix of their own; the server listens on one address, loopback by default.

A server on PATH (the vendor's container) is taken as it is. The one in the wheel ``nvidia-pytriton`` needs
its Python stub beside the backend, this interpreter's libpython and the wheel's own libraries.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trtllm_av.runtime.errors import AdaptiveVerificationError, MissingDependencyError

# The server waits that long for clients that keep a gRPC stream open, and may not even end then.
_EXIT_SECONDS = 5
_STOP_SECONDS = _EXIT_SECONDS + 3.0
_SHARED_MEMORY = Path("/dev/shm")


class ServerError(AdaptiveVerificationError):
    """The Triton server did not start or ended by itself (exit code 1)."""


@dataclass(frozen=True, slots=True)
class Installation:
    """Where tritonserver is and what it needs around it."""

    arguments: list[str]
    environment: dict[str, str]


def find_installation(work_folder: Path) -> Installation:
    """The server on PATH, in the vendor's container, or in the wheel; ``work_folder`` takes its backend."""
    found = shutil.which("tritonserver") or shutil.which("/opt/tritonserver/bin/tritonserver")
    if found is not None:
        return Installation([found], dict(os.environ))
    spec = find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "no tritonserver on PATH; run inside the vendor's Triton container, "
            "or for development: pip install 'trtllm-adaptive-verification[triton]'"
        )
    root = Path(spec.origin).parent / "tritonserver"
    backends = work_folder / "backends"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise MissingDependencyError(f"nvidia-pytriton has no stub for Python {version}; use 3.11")
    shutil.copytree(root / "backends" / "python", backends / "python")
    shutil.copy2(stub, backends / "python")
    libraries = [sysconfig.get_config_var("LIBDIR"), root.parents[1] / "nvidia_pytriton.libs"]
    environment = dict(os.environ)
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, libraries))
    # The stub finds its packages through the first python3 on PATH.
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return Installation(
        [str(root / "bin" / "tritonserver"), f"--backend-directory={backends}",
         f"--cache-directory={root / 'caches'}"],
        environment,
    )  # fmt: skip


def _check_port(address: str, port: int) -> None:
    """ServerError if something listens there: its answers would pass for those of the new server."""
    try:
        [(family, kind, _, _, where), *_] = socket.getaddrinfo(
            address, port, type=socket.SOCK_STREAM
        )
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise ServerError(
            f"cannot listen on {address}:{port}: {error.strerror}; choose another port or address"
        ) from None


class TritonServer:
    """A running server; ``stop`` it, or use it as a context."""

    def __init__(
        self,
        repository: Path,
        work_folder: Path,
        *,
        address: str = "127.0.0.1",
        http_port: int = 8000,
        grpc_port: int = 8001,
        metrics_port: int = 8002,
        arguments: tuple[str, ...] = (),
    ) -> None:
        for port in (http_port, grpc_port, metrics_port):
            _check_port(address, port)
        installation = find_installation(work_folder)
        self.http_url = f"{address}:{http_port}"
        self.grpc_url = f"{address}:{grpc_port}"
        self.metrics_url = f"{address}:{metrics_port}"
        self._prefix = f"trtllm_av_{os.getpid()}_{http_port}_"
        self._process = subprocess.Popen(
            [
                *installation.arguments,
                f"--model-repository={repository}",
                f"--http-address={address}", f"--http-port={http_port}",
                f"--grpc-address={address}", f"--grpc-port={grpc_port}",
                f"--metrics-address={address}", f"--metrics-port={metrics_port}",
                "--disable-auto-complete-config",
                "--allow-gpu-metrics=false",
                f"--exit-timeout-secs={_EXIT_SECONDS}",
                "--model-control-mode=explicit",  # lets an operator reload a model that died
                "--load-model=*",
                f"--backend-config=python,shm-region-prefix-name={self._prefix}",
                "--backend-config=python,shm-default-byte-size=4194304",
                *arguments,
            ],
            env=installation.environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,  # ours carries the address of the server
            start_new_session=True,  # a group of its own, with all its stubs
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, timeout: float) -> None:
        """Return once all models are loaded; ServerError if it ends first or takes too long."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if (code := self._process.poll()) is not None:
                raise ServerError(
                    f"tritonserver ended with code {code} before it was ready; its messages say why"
                )
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                url = f"http://{self.http_url}/v2/health/ready"
                with urllib.request.urlopen(url, timeout=2) as reply:
                    if reply.status == 200:
                        return
            time.sleep(0.1)
        raise ServerError(
            f"tritonserver was not ready after {timeout:.0f} s; raise --start-timeout"
        )

    def wait(self) -> int:
        """Block until the server ends; its exit code."""
        return self._process.wait()

    def forward(self, number: int) -> None:
        """Pass a signal on; the server ends its requests and exits."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def stop(self) -> None:
        """End the server and everything it started, and remove their shared memory."""
        self.forward(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # stubs that outlived a crash
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for path in _SHARED_MEMORY.glob(f"{self._prefix}*"):
            path.unlink(missing_ok=True)

    def __enter__(self) -> TritonServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
