"""A server on loopback that answers as Prefect's and MLflow's do behind a password, also with a certificate of its own.

It stands for both where only who is let in matters; the real Prefect server is in the tests marked `servers`.
"""

import base64
import ipaddress
import json
import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

OPEN = ("/health", "/api/health", "/api/ready")
"""What both servers answer without a password."""
ANSWERS = {"/api/flows/filter": [], "/api/2.0/mlflow/experiments/search": {"experiments": []}}


def certificate(folder: Path) -> Path:
    """A certificate for 127.0.0.1 that signed itself, and its key, in one PEM file that also serves as the CA's."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a private CA")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / "ca.pem"
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM) + secret)
    return path


class Guarded(ThreadingHTTPServer):
    """Answers those who give `user:password`; `status` instead of a 401 to all others."""

    daemon_threads = True

    def __init__(self, credentials: str = "ops:right", pem: Path | None = None, status: int = 401) -> None:
        self.wanted = f"Basic {base64.b64encode(credentials.encode()).decode()}"
        self.status = status
        self.asked: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.url = f"{'https' if pem else 'http'}://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that doesn't trust the certificate hangs up: what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: Guarded

    def do_GET(self) -> None:
        """Answer."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        let_in = path in OPEN or self.headers.get("Authorization") == self.server.wanted
        known = path in OPEN or path in ANSWERS
        status = self.server.status if not let_in else 200 if known else 404
        body = json.dumps(ANSWERS.get(path, {})) if let_in else "You are not authenticated."
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""
