"""The stack's passwords: generated once, kept in files of mode 600, never on a command line."""

import base64
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shlex
from collections.abc import Iterable
from pathlib import Path

from components.base.errors import UserError
from components.base.files import make_folder, replacing, sync
from flows.stack.config import LOOPBACK, Stack

ROLES = ("prefect", "mlflow", "mlflow_auth")
"""PostgreSQL's roles. Each owns the database of its name."""
NAMES = (
    "postgres", *ROLES, "prefect_api", "mlflow_admin", "mlflow_tether", "mlflow_session", "s3_mlflow", "s3_tether"
)  # fmt: skip
USER = "tether"
"""The user name of our clients in Prefect and MLflow."""
_BYTES = 24


def write_private(path: Path, text: str, owner: int | None = None) -> None:
    """Write a file that only its owner can ever read, even while it is written."""
    with replacing(path) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            if owner is not None:
                os.fchown(descriptor, owner, -1)
            file.write(text)


def make_passwords(stack: Stack) -> dict[str, str]:
    """Return the passwords by name (`NAMES`); missing ones are generated.

    Raises:
        UserError: the file of passwords is damaged, or others can read it.
    """
    make_folder(stack.secrets)
    stack.secrets.chmod(0o700)
    found = read_passwords(stack) if _file(stack).exists() else {}
    missing = [name for name in NAMES if name not in found]
    if missing:
        if stack.database.exists():
            raise UserError(
                f"{_file(stack)}: the passwords {', '.join(missing)} are missing, and the databases in {stack.folder} "
                f"were created with others. Restore that file."
            )
        found |= _generated(missing)
        write_private(_file(stack), json.dumps(found, indent=1))
    return found


def next_passwords(stack: Stack) -> dict[str, str]:
    """Return the passwords that will replace the current ones; generated on the first call of a change."""
    if not next_file(stack).exists():
        write_private(next_file(stack), json.dumps(_generated(NAMES), indent=1))
    return _read(next_file(stack))


def replace_passwords(stack: Stack) -> None:
    """Make the next passwords the current ones."""
    os.replace(next_file(stack), _file(stack))
    sync(stack.secrets)


def next_file(stack: Stack) -> Path:
    """Return the file of the next passwords, which exists only while passwords are being changed."""
    return stack.secrets / "next.json"


def _generated(names: Iterable[str]) -> dict[str, str]:
    return {name: secrets.token_urlsafe(_BYTES) for name in names}


def read_passwords(stack: Stack) -> dict[str, str]:
    """Return the passwords by name.

    Raises:
        UserError: the file is missing or damaged, or others can read it.
    """
    return _read(_file(stack))


def _read(path: Path) -> dict[str, str]:
    try:
        mode = path.stat().st_mode
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file. Start the stack: `tether stack up`.") from error
    except ValueError as error:
        raise UserError(f"{path} is damaged: it is not valid JSON. Restore it.") from error
    if mode & 0o077:
        raise UserError(f"{path}: others can read the passwords (mode {mode & 0o777:o}). Run `chmod 600 {path}`.")
    if not isinstance(found, dict) or not all(isinstance(each, str) and _is_plain(each) for each in found.values()):
        raise UserError(f"{path} is damaged: it must map names to passwords of letters, digits, - and _. Restore it.")
    return found


def write_files(stack: Stack, passwords: dict[str, str]) -> None:
    """Write the files from which servers read passwords, each in its own format."""
    port = stack.config.ports.postgres
    write_private(
        stack.secrets / "pgpass",
        "".join(f"{LOOPBACK}:{port}:{role}:{role}:{passwords[role]}\n" for role in ROLES)
        + f"{LOOPBACK}:{port}:*:postgres:{passwords['postgres']}\n",
    )
    identities = [
        {"name": name, "credentials": [{"accessKey": access_key(name), "secretKey": passwords[f"s3_{name}"]}],
         "actions": [f"{action}:{name}" for action in ("Admin", "Read", "Write", "List", "Tagging")]}
        for name in ("mlflow", "tether")
    ]  # fmt: skip
    write_private(stack.secrets / "s3.json", json.dumps({"identities": identities}, indent=1))
    write_private(
        stack.secrets / "aws",
        f"[default]\naws_access_key_id = {access_key('mlflow')}\naws_secret_access_key = {passwords['s3_mlflow']}\n",
    )


def scram(password: str, salt: bytes | None = None, rounds: int = 4096) -> str:
    """Return the verifier that PostgreSQL stores for a password, so that it never sees the password itself.

    RFC 5802, section 3: with `S = PBKDF2-HMAC-SHA-256(password, salt, rounds)`, `StoredKey = SHA-256(HMAC(S, "Client
    Key"))` and `ServerKey = HMAC(S, "Server Key")`; written `SCRAM-SHA-256$rounds:salt$StoredKey:ServerKey` in base64
    (PostgreSQL's manual, pg_authid). `password` is ASCII, which SASLprep does not change.
    """
    salt = secrets.token_bytes(16) if salt is None else salt
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, rounds)
    client, server = (hmac.digest(salted, what, "sha256") for what in (b"Client Key", b"Server Key"))
    text = [base64.b64encode(each).decode() for each in (salt, hashlib.sha256(client).digest(), server)]
    return f"SCRAM-SHA-256${rounds}:{text[0]}${text[1]}:{text[2]}"


def exports(stack: Stack, passwords: dict[str, str]) -> dict[str, str]:
    """Return the environment variables with which a terminal or a worker uses the stack."""
    found = {
        "TETHER_HOME": str(stack.home),
        "PREFECT_API_URL": f"{stack.url('prefect')}/api",
        "PREFECT_API_AUTH_STRING": f"{USER}:{passwords['prefect_api']}",
        "MLFLOW_TRACKING_URI": stack.url("mlflow"),
        "MLFLOW_TRACKING_USERNAME": USER,
        "MLFLOW_TRACKING_PASSWORD": passwords["mlflow_tether"],
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
        "TETHER_STORE": "s3://tether/store",
        "AWS_ENDPOINT_URL": stack.url("s3"),
        "AWS_ACCESS_KEY_ID": access_key("tether"),
        "AWS_SECRET_ACCESS_KEY": passwords["s3_tether"],
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    if stack.has_authority:  # Prefect, MLflow and boto read different ones
        bundle = str(authorities(stack))
        found |= {"SSL_CERT_FILE": bundle, "REQUESTS_CA_BUNDLE": bundle, "AWS_CA_BUNDLE": bundle}
    return found


def access_key(bucket: str) -> str:
    """Return the access key of the identity that owns a bucket.

    It is an unusual word, because the value of AWS_ACCESS_KEY_ID is removed from all output.
    """
    return f"s3-{bucket}"


def authorities(stack: Stack) -> Path:
    """Return the file of certificate authorities that clients trust: the usual ones and the stack's."""
    return stack.folder / "ca.crt"


def write_exports(stack: Stack, passwords: dict[str, str]) -> None:
    """Write the exports to a file for a shell."""
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exports(stack, passwords).items()]
    write_private(stack.exports, "\n".join([*lines, ""]))


def _file(stack: Stack) -> Path:
    return stack.secrets / "passwords.json"


def _is_plain(password: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        return bool(password) and all(each in b"-_" or chr(each).isalnum() for each in password.encode("ascii"))
    return False
