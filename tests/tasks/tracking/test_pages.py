"""Links from MLflow's pages to Prefect's."""

import pytest

from tasks.tracking.pages import prefect_tag


@pytest.mark.parametrize(
    ("environment", "page"),
    [
        ({"PREFECT_API_URL": "http://me:geheim@host:4200/api"}, "http://host:4200/runs/flow-run/f1"),
        ({"PREFECT_API_URL": "http://in/api", "PREFECT_UI_URL": "https://out"}, "https://out/runs/flow-run/f1"),
        ({}, None),
    ],
)
def test_a_run_that_prefect_began_names_its_page_without_a_password(environment, page, monkeypatch) -> None:
    for name in ("PREFECT_API_URL", "PREFECT_UI_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert prefect_tag("f1") == ({"tether.prefect": page} if page else {})
    assert prefect_tag(None) == {}
