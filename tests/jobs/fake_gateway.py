"""A gateway that exchanges weights for the key of an admin."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

ADMIN_KEY = "sk-of-an-admin"
RESULT = {
    "server": "node0:8001",
    "version": 1,
    "digests": {"system_fingerprint": "fp_new"},
    "pause_seconds": 0.01,
    "mixed_rows": 2,
    "difference": 1e-6,
}


@contextmanager
def fake_gateway(
    folder: Path, error: str = "", tls: tuple[str, str] | None = None
) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """The ready file of a server behind it, and the bodies that come with the right key.

    error: what it answers instead
    tls:   PEM files of its certificate and of the key
    """
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/admin/weights"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, reply = 403, {"error": {"message": "admins only"}}
            if self.headers["Authorization"] == f"Bearer {ADMIN_KEY}":
                bodies.append(body)
                status, reply = 200, {"model": "tiny", "servers": [RESULT]}
                if error:
                    status, reply = 409, {"error": {"message": error}}
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    keys = folder / "keys"
    keys.write_text(f"clients=sk-of-clients\nadmin={ADMIN_KEY}\n")
    keys.chmod(0o600)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*tls)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        ready = folder / "ready.json"
        openai = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}/v1"
        ready.write_text(json.dumps({"openai": openai, "api_keys": str(keys)}))
        try:
            yield ready, bodies
        finally:
            server.shutdown()
            thread.join()
