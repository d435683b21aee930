"""A credential in a URL or in the environment is not said; what looks like one is left as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.base.errors import TetherError, UserError, refuse_credentials
from components.base.redaction import has_credentials, redacted

SECRET = "hunter2-geheim"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://me:{SECRET}@host:5000/api: refused", "http://host:5000/api: refused"),
        (f"see (postgresql+psycopg://me:{SECRET}@host/db).", "see (postgresql+psycopg://host/db)."),
        (f"http://me:p@{SECRET}@host", "http://host"),
        (f"http://{SECRET}@host", "http://host"),
        (f"s3://bucket/a?x=1&X-Amz-Signature={SECRET}&y=2", "s3://bucket/a?x=1&X-Amz-Signature=***&y=2"),
        (f"http://h/?api_key={SECRET}", "http://h/?api_key=***"),
        ("http://host/a@b?page=2#x@y", "http://host/a@b?page=2#x@y"),
        ("mail a@b, file:///tmp/x@y", "mail a@b, file:///tmp/x@y"),
    ],
)
def test_a_secret_in_a_url_is_taken_out_and_the_rest_stays(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert has_credentials(text) == (text != shown)
    assert SECRET not in str(TetherError(text))


def test_a_secret_of_the_environment_is_taken_out_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:p%40ss-word@host")
    monkeypatch.setenv("SHORT_TOKEN", "ab")
    assert redacted(f"ab: {SECRET} or p%40ss-word or p@ss-word") == "ab: *** or *** or ***"
    with pytest.raises(UserError, match="--tag x holds a password"):
        refuse_credentials("--tag x", f"my {SECRET}")


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/?#'\"<>@:"), min_size=6))
def test_no_password_is_said_whatever_its_characters(password: str) -> None:
    assert redacted(f"a http://me:{password}@host b") == "a http://host b"
