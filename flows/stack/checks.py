"""Ask each server of a stack: a question without a password, and one that needs it."""

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

from components.base.redaction import redacted
from components.base.text import line
from components.rollouts.asking import HttpClient
from flows.stack.config import LOOPBACK, Stack
from flows.stack.parts import MLFLOW, POSTGRES, PREFECT, S3, TLS, part_names, worker_name, worker_part
from flows.stack.secrets import ROLES, USER, access_key, authorities

SECONDS = 20.0
"""How long a server may take to answer; PBKDF2 and a busy machine need some time."""

Verdict = Literal["ok", "away", "refused"]


class Answer(NamedTuple):
    """The answer of one part."""

    part: str
    verdict: Verdict
    """`refused` if the part runs but rejects the password."""
    told: str
    """One sentence: what is wrong or, if nothing is, what was asked."""


class Wrong(Exception):
    """A server does not answer as it should; the message says how."""

    verdict: Verdict = "away"
    status: int | None = None
    """The answer's status, if there is an answer."""


class Refused(Wrong):
    """A server rejects the password."""

    verdict = "refused"


def ask_all(stack: Stack, passwords: dict[str, str]) -> list[Answer]:
    """Return the answers of all parts, in the order of the parts."""
    asked: dict[str, Callable[[], str]] = {
        POSTGRES: lambda: _ask_postgres(stack, passwords),
        S3: lambda: _ask_s3(stack, passwords),
        PREFECT: lambda: _ask_prefect(stack, passwords),
        MLFLOW: lambda: _ask_mlflow(stack, passwords),
        TLS: lambda: _ask_tls(stack),
        **{worker_part(pool): lambda pool=pool: _ask_worker(stack, passwords, pool) for pool in stack.config.workers},  # type: ignore[misc]
    }
    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(lambda name: _answer(name, asked[name]), part_names(stack)))


def _answer(part: str, ask: Callable[[], str]) -> Answer:
    try:
        return Answer(part, "ok", ask())
    except Wrong as wrong:
        return Answer(part, wrong.verdict, redacted(line(str(wrong))))


def request(
    stack: Stack, url: str, user: str | None = None, password: str = "", body: dict[str, Any] | None = None
) -> Any:
    """Return a server's answer as JSON, or as text if it is not JSON. If `body` is given, it is posted.

    Raises:
        Refused: the server rejects the password.
        Wrong: it does not answer, or answers with an error.
    """
    import httpx

    try:
        with HttpClient(SECONDS, Wrong, verify=_trust(stack), follow_redirects=True) as client:
            method, auth = "GET" if body is None else "POST", None if user is None else (user, password)
            answer = client.request(method, url, json=body, auth=auth)
    except (OSError, httpx.HTTPError) as error:
        raise Wrong(f"{url} does not answer: {error or type(error).__name__}") from error
    status = f"{answer.status_code} {httpx.codes.get_reason_phrase(answer.status_code)}"
    if answer.status_code in (401, 403):
        wrong: Wrong = Refused(f"{url} rejects the password of user {user} ({status})")
    elif answer.status_code >= 300:
        behind = ": the server behind the TLS part does not answer" if answer.status_code == 502 else ""
        wrong = Wrong(f"{url} answers {status}{behind}")
    else:
        value, problem = answer.parsed()
        return answer.text if problem else value
    wrong.status = answer.status_code
    raise wrong


def _trust(stack: Stack) -> ssl.SSLContext:
    if not stack.has_authority:
        return ssl.create_default_context()
    if not authorities(stack).exists():
        raise Wrong(f"{authorities(stack)} is missing: Caddy has not created its authority yet")
    return ssl.create_default_context(cafile=str(authorities(stack)))


def _ask_postgres(stack: Stack, passwords: dict[str, str]) -> str:
    for role in ROLES:
        asyncio.run(_log_in(stack, role, passwords[role]))
    return f"{', '.join(ROLES)} log in"


async def _log_in(stack: Stack, role: str, password: str) -> None:
    import asyncpg

    where = f"PostgreSQL on {LOOPBACK}:{stack.config.ports.postgres}"
    try:
        connection = await asyncpg.connect(
            host=LOOPBACK, port=stack.config.ports.postgres, user=role, password=password, database=role,
            timeout=SECONDS, ssl=False,
        )  # fmt: skip
        try:
            await connection.fetchval("SELECT 1")
        finally:
            await connection.close(timeout=SECONDS)
    except asyncpg.InvalidAuthorizationSpecificationError as error:
        raise Refused(f"{where} rejects the password of role {role}") from error
    except (asyncpg.PostgresError, OSError, TimeoutError, asyncpg.InterfaceError) as error:
        raise Wrong(f"{where} does not answer: {error or type(error).__name__}") from error


def s3_files(stack: Stack, bucket: str, password: str) -> Any:
    """Return a file system with the credentials of the bucket's owner, without going through TLS."""
    import fsspec

    return fsspec.filesystem("s3", **s3_options(stack, bucket, password))


def s3_options(stack: Stack, bucket: str, password: str) -> dict[str, Any]:
    """Return the options of the file system of `s3_files`."""
    return {
        "key": access_key(bucket), "secret": password,
        "endpoint_url": f"http://{LOOPBACK}:{stack.config.ports.s3_server}",
        "client_kwargs": {"region_name": "us-east-1"}, "skip_instance_cache": True, "use_listings_cache": False,
        "config_kwargs": {"connect_timeout": SECONDS, "read_timeout": SECONDS, "retries": {"max_attempts": 1}},
    }  # fmt: skip


def _ask_s3(stack: Stack, passwords: dict[str, str]) -> str:
    request(stack, f"{stack.url('s3')}/healthz")
    for bucket in ("mlflow", "tether"):
        try:
            s3_files(stack, bucket, passwords[f"s3_{bucket}"]).ls(bucket, detail=False)
        except FileNotFoundError as error:
            raise Wrong(f"the S3 server has no bucket {bucket}; `tether stack up` creates it") from error
        except PermissionError as error:
            raise Refused(f"the S3 server rejects the secret of access key {access_key(bucket)}") from error
        except Exception as error:  # any exception of botocore and aiohttp
            raise Wrong(f"the S3 server does not list bucket {bucket}: {error}") from error
    return "both buckets are listed"


def _ask_prefect(stack: Stack, passwords: dict[str, str]) -> str:
    request(stack, f"{stack.url('prefect')}/api/health")
    count = request(stack, f"{stack.url('prefect')}/api/flow_runs/count", USER, passwords["prefect_api"], {})
    return f"counts {count} flow runs"


def _ask_mlflow(stack: Stack, passwords: dict[str, str]) -> str:
    request(stack, f"{stack.url('mlflow')}/health")
    url = f"{stack.url('mlflow')}/api/2.0/mlflow/experiments/search?max_results=1"
    request(stack, url, USER, passwords["mlflow_tether"])
    return "lists its experiments"


def _ask_tls(stack: Stack) -> str:
    for name in ("prefect", "mlflow", "s3"):
        try:
            request(stack, stack.url(name))
        except Wrong as wrong:
            if wrong.status is None:  # an error status is an answer too
                raise
    return "three certificates are valid"


def _ask_worker(stack: Stack, passwords: dict[str, str], pool: str) -> str:
    url = f"{stack.url('prefect')}/api/work_pools/{pool}/workers/filter"
    try:
        found = request(stack, url, USER, passwords["prefect_api"], {})
    except Refused:
        raise
    except Wrong as wrong:
        raise Wrong(f"Prefect can't be asked about it: {wrong}") from wrong
    if not any(each["name"] == worker_name(pool) and each["status"] == "ONLINE" for each in found):
        raise Wrong(f"Prefect has not heard of the worker {worker_name(pool)} of pool {pool}")
    return f"takes {stack.config.workers[pool]} runs of pool {pool} at a time"


def make_buckets(stack: Stack, passwords: dict[str, str]) -> None:
    """Create the buckets that are missing.

    Raises:
        Wrong: the server does not answer yet.
    """
    for bucket in ("mlflow", "tether"):
        try:
            files = s3_files(stack, bucket, passwords[f"s3_{bucket}"])
            if not files.exists(bucket):
                files.mkdir(bucket)
        except Exception as error:  # any exception of botocore and aiohttp
            raise Wrong(f"the S3 server does not create bucket {bucket}: {error}") from error


def make_mlflow_user(stack: Stack, passwords: dict[str, str]) -> None:
    """Create the MLflow user that our runs write as, unless it exists.

    Raises:
        Refused: MLflow rejects its administrator's password.
        Wrong: it does not answer yet.
    """
    url = f"{stack.url('mlflow')}/api/2.0/mlflow/users"
    try:
        request(stack, f"{url}/get?username={USER}", "admin", passwords["mlflow_admin"])
    except Refused:
        raise
    except Wrong as wrong:
        if wrong.status != 404:
            raise
        body = {"username": USER, "password": passwords["mlflow_tether"]}
        request(stack, f"{url}/create", "admin", passwords["mlflow_admin"], body)
    # It may write what it created, and only read others' experiments (default_permission).
