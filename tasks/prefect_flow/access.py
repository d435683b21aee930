"""Check that a Prefect server accepts us. Its `/health` answers anybody, so a call is made that needs credentials."""

import os

import httpx
from prefect.client.orchestration import get_client
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from components.base.errors import TetherError, UserError
from components.base.redaction import redacted

TIMEOUT_SECONDS = 30.0
NO_API = "what answers there is not Prefect's API. Its address ends in /api, as http://127.0.0.1:4200/api."


def ask_server() -> None:
    """Make a call to the server at `PREFECT_API_URL` that needs credentials and its database.

    Raises:
        UserError: it rejects us, or is not a Prefect server; the message names the variable to set.
        TetherError: it does not answer, or answers with a server error.
    """
    url = os.environ["PREFECT_API_URL"]
    where = f"PREFECT_API_URL = {redacted(url)}"
    settings = {PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0, PREFECT_API_REQUEST_TIMEOUT: TIMEOUT_SECONDS}
    try:
        with temporary_settings(settings), get_client(sync_client=True) as client:
            client.read_flows(limit=1)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UserError(
                f"{where}: the Prefect server refuses this user ({status}). Set PREFECT_API_AUTH_STRING to what its "
                "PREFECT_SERVER_API_AUTH_STRING says, USER:PASSWORD (or PREFECT_API_KEY, if it takes keys), of a user "
                "who may read flows."
            ) from error
        if status < 500:
            raise UserError(f"{where}: {NO_API} ({status})") from error
        raise TetherError(
            f"{where}: the Prefect server answers {status}, as it does while its database is away. See its log, and "
            f"try again."
        ) from error
    except httpx.TransportError as error:
        raise TetherError(f"{where}: the Prefect server does not answer ({type(error).__name__}: {error}).") from error
    except ValueError as error:  # from pydantic or JSON, for example if it is a web page
        raise UserError(f"{where}: {NO_API}") from error
