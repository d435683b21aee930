"""A credential in a URL or in the environment is not said; what looks like one is left as it is."""

import base64
import string
import time

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
        ("git+ssh://git@github.com/a@b", "git+ssh://github.com/a@b"),
        ("ssh://git@github.com:22/org/repo@v1", "ssh://github.com:22/org/repo@v1"),
        ("postgresql://user:pa/ss#w?rd@host:5432/db", "postgresql://host:5432/db"),
        ("redis://:8/a@host:1/0", "redis://host:1/0"),  # a port is followed by the same characters
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


@pytest.mark.parametrize(
    "text",
    [
        "https://host/path/@scope/x",
        "git+https://github.com/a@b",
        "hf://org/model@commit",
        "tether-policy@champion of me@example.com",
        "http://localhost:5000/#/models/x@champion",
        "http://mlflow.example:5000/x@y, http://127.0.0.1:80/a@b",
        "http://[::1]:80/a@b http://[::1]/a@b",
        "see http://host:5000, or a@b",
        "max_new_tokens=5 eos_token='</s>' pad_token=x tokenizer=y nats per token = 0.5",
        "key = 3, unknown key: sft, unexpected token: x, credentials: refused",
        "sent as a bearer token; basic auth is needed; Set PREFECT_API_AUTH_STRING to it",
    ],
)
def test_a_text_without_a_secret_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("host=h password='{}' dbname=x", "host=h password=*** dbname=x"),
        ("host=h password = {} dbname=x", "host=h password = *** dbname=x"),
        ("Authorization: Bearer {}", "Authorization: Bearer ***"),
        ("{{'authorization': 'Basic {}'}}", "{{'authorization': 'Basic ***'}}"),
        ("[(b'Authorization', b'Bearer {}')]", "[(b'Authorization', b'Bearer ***')]"),
        ("X-Api-Key: {}", "X-Api-Key: ***"),
        ("PRIVATE-TOKEN: {}", "PRIVATE-TOKEN: ***"),
        ("serve --token {} --port 1", "serve --token *** --port 1"),
        ("serve --hf-token={} --port 1", "serve --hf-token=*** --port 1"),
        ("export PGPASSWORD={}", "export PGPASSWORD=***"),
        ("MY_KEY={} x", "MY_KEY=*** x"),
        ('{{"dbPassword": "{}", "n": 1}}', '{{"dbPassword": ***, "n": 1}}'),
        ("http://h/?sig={}&y=2", "http://h/?sig=***&y=2"),
        ("http://h/#access_token={}", "http://h/#access_token=***"),
        ("Server=h;Pwd={};User=me", "Server=h;Pwd=***;User=me"),
    ],
)
def test_a_value_that_is_called_secret_is_taken_out(before: str, after: str) -> None:
    text = before.format("c2VjcmV0c2VjcmV0/4711+x==")
    assert redacted(text) == after.format() and has_credentials(text)
    assert redacted(redacted(text)) == redacted(text)


@pytest.mark.parametrize(
    "name",
    [
        "PGPASSWORD", "OPENAI_APIKEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "MY_PASSWD", "X_API_KEY", "dbPassword",
        "apiKey", "DB_PASS", "MYSQL_PWD", "SSHPASS", "PREFECT_API_AUTH_STRING", "APP_PASSPHRASE", "MY_SECRETS",
    ],
)  # fmt: skip
def test_a_variable_is_secret_by_a_part_of_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert redacted(f"so {SECRET}!") == "so ***!"


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM", "KEYBOARD", "max_new_tokens", "MONKEY", "PWD", "OLDPWD", "AUTHOR", "COMPASS",
        "SSH_AUTH_SOCK", "AWS_SHARED_CREDENTIALS_FILE", "SECRETARY",
    ],
)  # fmt: skip
def test_a_variable_that_only_sounds_secret_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert redacted(f"so {SECRET}!") == f"so {SECRET}!"


def test_a_variables_dsn_or_url_gives_its_password_away_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKEND", "host=h user=u password='a b\\'c'")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "ops:geheim-1")
    monkeypatch.setenv("DATABASE", "postgresql://me:pa ss/w#rd@host/db")
    monkeypatch.setenv("REMOTE", "https://ghp_0123456789abcdef@github.com/x")
    told = "a b\\'c or geheim-1 or pa ss/w#rd or pa%20ss%2Fw%23rd or ghp_0123456789abcdef"
    assert redacted(told) == " or ".join(["***"] * 5)


@pytest.mark.parametrize("text", ["token_" * 50_000, "://a:" * 5_000, "-" * 500_000, " --a" * 50_000, "?a" * 50_000])
def test_a_long_text_is_searched_in_linear_time(text: str) -> None:
    began = time.process_time()
    redacted(text)
    assert time.process_time() - began < 5


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/?#'\"<>@:"), min_size=6))
def test_no_password_is_said_whatever_its_characters(password: str) -> None:
    assert redacted(f"a http://me:{password}@host b") == "a http://host b"


PRINTABLE = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
RANDOM = st.binary(min_size=6, max_size=40)


@given(st.one_of(PRINTABLE, *(RANDOM.map(lambda b, f=f: f(b).decode()) for f in (base64.b64encode, base64.b32encode))))
def test_no_url_says_a_random_password(password: str) -> None:
    assert redacted(f"a postgresql://me:{password}@host:5432/db b") == "a postgresql://host:5432/db b"
    assert redacted(f"at redis://:{password}@h") == "at redis://h"
    told = redacted(f"host=h password='{password.translate({39: None, 92: None})}' x=1")
    assert told in ("host=h password=*** x=1", "host=h x=1")


@given(st.text(string.ascii_letters + string.digits + "+/=", min_size=8))
def test_no_header_option_or_query_says_a_random_token(token: str) -> None:
    assert redacted(f"Authorization: Bearer {token} b") == "Authorization: Bearer *** b"
    assert redacted(f"--token {token} b") == "--token *** b"
    assert redacted(f"http://h/?token={token}&y=1") == "http://h/?token=***&y=1"
