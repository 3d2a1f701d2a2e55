"""A tritonserver as a child process: started with all it needs, ended with all it started.

Workers of Triton's Python backend that the server gave up while they started.

The server wants a sign of life from a starting worker every second (ReceiveMessageFromStub in
stub_launcher.cc of triton-inference-server/python_backend). A worker that was held up for longer,
because its node was too busy or was suspended, is lost even when it goes on. The server then ends
with an error, or is aborted by a lock in the memory that both shared, or waits for the worker's end
and never gets ready. Another start helps.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any
from urllib.parse import quote

from launcher_scripts.common.errors import ServerError, problem
from launcher_scripts.common.http_client import UNIX
from launcher_scripts.common.processes import (
    ServerLock,
    is_word,
    server_limits,
    set_limits,
    signal_when_parent_dies,
    start_of,
)
from launcher_scripts.config.security import SERVER_NAME, ServerTls, read_secrets
from launcher_scripts.config.settings import DeploySettings
from launcher_scripts.models.repository import is_remote
from launcher_scripts.server.installation import Installation, prefer_numpy

SECOND_STARTS = 1
REASON = (
    "the server gave up a worker of its Python backend that was held up for more than a second "
    "while it started: the node is too busy, or was suspended; or the worker died"
)
_SIGNS = (
    "boost::interprocess::lock_exception",
    "' is not healthy.",
    "Failed to obtain the health mutex.",
)
# The server also waits so, briefly, for a first trial of the worker's program.
_WAITING_SECONDS = 15.0


def is_sign(line: str) -> bool:
    """Return whether the line of a server's log says that it has given up a worker."""
    return any(sign in line for sign in _SIGNS)


class LostWorkerDetector:
    """Notices a starting server that waits for the end of a worker, which does not come."""

    def __init__(self, pid: int) -> None:
        self._threads = Path(f"/proc/{pid}/task")
        self._since: float | None = None

    def __call__(self) -> bool:
        """Return whether it has waited long; always False where the kernel does not tell."""
        if not self._waits():
            self._since = None
            return False
        if self._since is None:
            self._since = time.monotonic()
        return time.monotonic() - self._since > _WAITING_SECONDS

    def _waits(self) -> bool:
        with contextlib.suppress(OSError), os.scandir(self._threads) as threads:
            for thread in threads:  # hundreds, several times a second
                file = os.open(f"{thread.path}/wchan", os.O_RDONLY)
                try:
                    if os.read(file, 64) == b"do_wait":
                        return True
                finally:
                    os.close(file)
        return False


TOKEN_HEADER = "launcher-admin"
# In the secrets file: a token that people know; without it, it is one that nobody does.
TOKEN_VARIABLE = "LAUNCHER_ADMIN_TOKEN"


# Of a closed server, in its own folder, which nobody else may enter.
SOCKETS = {"http": "http.sock", "metrics": "metrics.sock"}
_MAX_SOCKET_PATH = 108  # unix(7)
_VALID = timedelta(days=3650)


@contextlib.contextmanager
def launch_credentials(settings: DeploySettings) -> Iterator[Path | None]:
    """The credentials of one start of a closed server, until the end of the block.

    A file of mode 600 beside the ready file: a private key, and a certificate of it which the
    server and its clients both show, and which is all that either of them trusts. None for a server
    that is not closed, or has certificates of its own.
    """
    if not settings.is_closed or settings.security.grpc_tls is not None:
        yield None
        return
    folder = settings.ready_file.absolute().parent / "credentials"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        path = folder / f"{secrets.token_hex(8)}.pem"
        path.touch(mode=0o600, exist_ok=False)
        path.write_bytes(_self_signed())
    except OSError as error:
        message = f"cannot write the credentials of the server: {error}"
        raise ServerError(problem(message, change="deploy.run.results_dir")) from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # those of other replicas are there
            folder.rmdir()


def _self_signed() -> bytes:
    """A new private key and a certificate of it, in PEM."""
    # Only closed servers need the package.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, SERVER_NAME)])
    now = datetime.now(timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of nodes differ
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


class Protection:
    """Protection of one run of a server.

    sockets: name -> path of the interfaces that only the owner of `folder` reaches
    """

    def __init__(
        self, settings: DeploySettings, folder: Path, credentials: Path | None = None
    ) -> None:
        """folder:   the server's own, of mode 700
        credentials: see launch_credentials
        """
        security = settings.security
        if settings.is_closed:
            security = replace(security, restricted_apis=())
        if credentials is not None:
            pem = str(credentials)
            security = replace(security, grpc_tls=ServerTls(pem, pem, client_ca=pem))
        self._credentials = credentials
        self.sockets = {name: folder / file for name, file in SOCKETS.items()}
        if not settings.is_closed:
            self.sockets = {}
        self._security = security
        path = security.secrets_file
        self.environment: Mapping[str, str] = {} if path is None else read_secrets(Path(path))
        self._token = self.environment.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that open the restricted parts of the HTTP interface."""
        return {TOKEN_HEADER: self._token}

    def arguments(self) -> list[str]:
        """Return the arguments of tritonserver. Models are those of the repository: nobody loads
        others."""
        arguments = ["--model-control-mode=none"]
        for port, (name, path) in enumerate(self.sockets.items(), start=1):
            if len(os.fsencode(path)) >= _MAX_SOCKET_PATH:
                message = "the path of a server's socket is too long"
                raise ServerError(problem(message, got=str(path), change="TMPDIR"))
            # No port is opened, but Triton wants its numbers to differ.
            arguments += [f"--{name}-address={UNIX}{path}", f"--{name}-port={port}"]
        if self._security.restricted_apis:
            restricted = f"{','.join(self._security.restricted_apis)}:{TOKEN_HEADER}={self._token}"
            arguments += [f"--http-restricted-api={restricted}"]
            arguments += [f"--grpc-restricted-protocol={restricted}"]
        tls = self._security.grpc_tls
        if tls is not None:
            kind = "grpc-use-ssl" if tls.client_ca is None else "grpc-use-ssl-mutual"
            arguments += [f"--{kind}=true"]
            arguments += [f"--grpc-server-cert={tls.certificate}", f"--grpc-server-key={tls.key}"]
            if tls.client_ca is not None:
                arguments += [f"--grpc-root-cert={tls.client_ca}"]
        return arguments

    def client_address(self, address: str) -> str:
        """host:port of gRPC, as clients take it: with the credentials; see clients/connection.py"""
        if self._credentials is None:
            return address
        return f"{address}#{quote(str(self._credentials))}"

    def hide(self, text: str) -> str:
        """`text` without the token, for logs."""
        return text.replace(self._token, "***")


STATUS_DIR_VARIABLE = "LAUNCHER_STATUS_DIR"
DEVICE_VARIABLE = "LAUNCHER_DEVICE"
MAX_WAITING_VARIABLE = "LAUNCHER_MAX_WAITING_ROWS"
CLOSED_VARIABLE = "LAUNCHER_CLOSED_SERVER"  # nobody reaches it without its start's credentials
CREDENTIALS_VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
TAIL_LINES = 60
_POLL_SECONDS = 0.05
_KILL_SECONDS = 10.0
_MAX_ERRORS = 5
# An error in Triton's log: level and time, process, place, and the message, mostly in quotes.
_ERROR_LINE = re.compile(r'E\d{4} [\d:.]+ \d+ \S+\] "?(?P<message>.*?)"?$')

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
# Logged as an error on every machine without a GPU.
_HARMLESS = "CudaDriverHelper has not been initialized"


class ServerProcess:
    """One running tritonserver.

    `folder` is empty and its own: backends/ and status/ are made there. The folder's name also
    marks every process of this server, through LAUNCHER_STATUS_DIR in their environment, so none
    is left behind whatever session or group it has moved to.
    """

    def __init__(
        self,
        settings: DeploySettings,
        installation: Installation,
        ports: Mapping[str, int],
        folder: Path,
        protection: Protection,
        env: Mapping[str, str] = _NO_VARIABLES,
    ) -> None:
        """Start it. env: further variables for it and all that it starts."""
        self._hide = protection.hide
        self._folder = folder
        self.status_dir = folder / "status"
        self.status_dir.mkdir()
        installation.make_backends(folder / "backends")
        if installation.numpy_dir is not None:
            prefer_numpy(folder, installation.numpy_dir)
        try:
            self._lock = ServerLock(folder)
        except OSError as error:
            raise ServerError(f"the server needs shared memory: {error}") from error
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._errors: list[str] = []
        self.lost_worker = False  # whether its log says so; see lost_workers
        arguments = self._arguments(settings, installation, ports) + protection.arguments()
        installation.require_options(arguments[1:])
        secrets = protection.environment
        variables = {STATUS_DIR_VARIABLE: str(self.status_dir), DEVICE_VARIABLE: settings.device}
        variables[MAX_WAITING_VARIABLE] = str(settings.max_waiting_rows)
        if settings.is_closed:
            variables[CLOSED_VARIABLE] = "1"
        if settings.cloud_credentials is not None:
            variables[CREDENTIALS_VARIABLE] = settings.cloud_credentials
        print(self._hide("starting " + " ".join(arguments)), flush=True)
        self._process, self._reader = start_child(
            arguments,
            {**installation.environment(), **variables, **env, **secrets},
            self._repeat_log,
            cwd=folder,  # the Python backend imports from here first
            pass_fds=self._lock.descriptors,
        )

    def _arguments(
        self, settings: DeploySettings, installation: Installation, ports: Mapping[str, int]
    ) -> list[str]:
        repository = settings.model_repository
        if not is_remote(repository):
            repository = str(self._plain(Path(repository).absolute()))
        arguments = [
            str(installation.executable.absolute()),
            f"--model-repository={repository}",
            f"--backend-directory={self._folder / 'backends'}",
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={max(1, round(settings.stop_timeout))}",
        ]
        if installation.names_memory_apart:
            prefix = f"shm-region-prefix-name={self._lock.region_prefix}"
            arguments.append(f"--backend-config=python,{prefix}")
        for name, host in settings.hosts.items():
            arguments += [f"--{name}-address={host}", f"--{name}-port={ports[name]}"]
        return arguments

    def _plain(self, repository: Path) -> Path:
        """The repository under a name that Triton's shell leaves as it is; see is_word."""
        if is_word(repository):
            return repository
        link = self._folder / "models"
        link.symlink_to(repository)
        return link

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while the server runs; negative: the signal that ended it."""
        return self._process.poll()

    def end_reason(self) -> str:
        """Describe the end of the server."""
        return ending(self.exit_code())

    def tail(self) -> str:
        """The last lines of the server's log."""
        if self.exit_code() is not None:
            self._reader.join(timeout=1)
        return "\n".join(self._tail)

    def errors(self) -> list[str]:
        """The first different errors in the server's log, without the Python stack below them."""
        if self.exit_code() is not None:
            self._reader.join(timeout=1)
        return list(self._errors)

    def members(self) -> list[int]:
        """Process ids of the server and of everything it started that is still alive."""
        mark = f"{STATUS_DIR_VARIABLE}={self.status_dir}".encode()
        result = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                # Processes end while we look, and other users' do not show their environment.
                with contextlib.suppress(OSError):
                    marked = mark in (entry / "environ").read_bytes().split(b"\0")
                    if marked and start_of(int(entry.name)) is not None:
                        result.append(int(entry.name))
        return result

    def stop(self, timeout: float) -> None:
        """Ask the server to end, give it `timeout` seconds, then end whatever is left of it."""
        if self.exit_code() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                print(f"the server did not end within {timeout:g} s and is killed", flush=True)
        self._kill_members()
        self._reader.join(timeout=5)
        self._lock.release()

    def kill(self, spared: int) -> None:
        """End the server and all that it started, but for the process `spared`, at once."""
        self._kill_members({spared})

    def hide_memory(self) -> None:
        """The server is ready: its processes have the memory open that they share."""
        self._lock.hide_memory()

    def _kill_members(self, spared: Container[int] = ()) -> None:
        deadline = time.monotonic() + _KILL_SECONDS
        while left := [pid for pid in self.members() if pid not in spared]:
            if time.monotonic() > deadline:
                print(f"processes of the server cannot be ended: {left}", file=sys.stderr)
                return
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)

    def _repeat_log(self, log: IO[str]) -> None:
        """Repeat the server's log as this job's output and remember its end."""
        for written in log:
            line = self._hide(written)
            self._tail.append(line.rstrip("\n"))
            self._note_error(line.rstrip("\n"))
            self.lost_worker = self.lost_worker or is_sign(line)
            # A closed terminal must not stop the reading: the server would block on a full pipe.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(line)
                sys.stdout.flush()

    def _note_error(self, line: str) -> None:
        match = _ERROR_LINE.match(line)
        if match and len(self._errors) < _MAX_ERRORS:
            message = match["message"].split("\\n\\nAt:")[0].replace("\\n", "\n").strip()
            if message not in self._errors and not message.startswith(_HARMLESS):
                self._errors.append(message)


def ending(code: int | None) -> str:
    """Describe the end of a process with this exit code; None: it runs."""
    if code is None:
        return "is running"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def start_child(
    arguments: Sequence[str], env: Mapping[str, str], repeat: Callable[[IO[str]], None], **more: Any
) -> tuple[subprocess.Popen[str], threading.Thread]:
    """A child process in a session of its own, and the thread in which `repeat` reads its log.

    env: variables besides this program's;  more: arguments of Popen
    """
    process = subprocess.Popen(
        arguments,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=_prepare_child(),
        **more,
    )
    reader = threading.Thread(target=repeat, args=(process.stdout,), daemon=True)
    reader.start()
    return process, reader


def _prepare_child() -> Callable[[], None]:
    """Return the child's preparation before the server: its limits, and SIGTERM when this program
    dies."""
    limits = server_limits()

    def prepare() -> None:
        set_limits(limits)
        signal_when_parent_dies(signal.SIGTERM)

    return prepare
