"""`ppo.rewards`: its forms, its names, and what of it stands in a key."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from components.base.settings import keyed_values
from components.ppo.config import PpoConfig


def config(*sources: dict[str, Any]) -> PpoConfig:
    return PpoConfig(rewards=sources, kl={"control": "fixed"})


def test_each_form_of_a_source_gets_its_own_options_and_a_name() -> None:
    found = config(
        {"source": "pipeline"}, {"source": "model:org/some-model@main", "judge": True},
        {"source": "function:my.rewards:brief"}, {"source": "http:https://scores.example/v1"},
        {"source": "verifier:number", "column": "answer"},
    ).rewards  # fmt: skip
    assert found is not None
    assert [each.name for each in found] == ["pipeline", "some_model", "brief", "http", "number"]
    assert found[3].url == "https://scores.example/v1" and found[2].target == ("my.rewards", "brief")


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ([], "the list is empty"),
        ([{"source": "pipeline", "judge": True}], "no source rewards"),
        ([{"source": "pipeline", "weight": 0}], "no source rewards"),
        ([{"source": "pipeline"}, {"source": "pipeline"}], "two sources are called pipeline"),
        ([{"source": "oracle"}], "needs a source: pipeline, model:"),
        ([{"weight": 1}], "needs a source"),
        ([{"source": "verifier:exact"}], "set either column"),
        ([{"source": "verifier:regex", "value": "("}], "not a regular expression"),
        ([{"source": "http:https://me:secret@host/"}], "pattern"),
        ([{"source": "pipeline", "name": "gain_low"}], "is another metric"),
    ],
)
def test_a_list_that_rewards_nothing_or_is_ambiguous_is_refused(sources: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        config(*sources)


def test_a_key_holds_the_functions_source_and_never_where_it_lies() -> None:
    sources = ({"source": "function:a:b", "root": "/x", "code": "1"}, {"source": "model:/folder"})
    here, there, edited = (
        keyed_values(config({**sources[0], **change}, sources[1])) for change in ({}, {"root": "/y"}, {"code": "2"})
    )
    assert here == there != edited
    assert "/folder" not in str(here) and "/x" not in str(here)
