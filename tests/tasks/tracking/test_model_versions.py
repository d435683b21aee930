"""Registered versions keep who was champion from when to when, and only a person undoes what a person did."""

import json

import pytest

from components.base.errors import GateFailed, UserError
from components.gates.judging import Waiver
from flows.models.alias_changes import demoted, promoted
from tasks.runs.journal import Sent
from tasks.runs.status import load_status
from tasks.tracking.model_versions import Versions, champion_terms, evaluation

POLICY = "tether-policy"


def terms(mlflow, version):
    return champion_terms(mlflow.get_model_version(POLICY, version).tags)


def aliases(mlflow):
    return {alias: int(version) for alias, version in mlflow.get_registered_model(POLICY).aliases.items()}


def test_a_champion_followed_demoted_and_promoted_again_keeps_its_history(pipeline, kit, client, home):
    first, _ = pipeline(value=1)
    pipeline(value=2, win=0.75)
    mlflow = client()
    (term,) = terms(mlflow, "1")
    assert term["because"] == f"human_eval passed in run {first.run}"
    assert "against the same SFT model are 0.750 (0.700 to 0.800) and 0.600" in terms(mlflow, "2")[0]["because"]
    assert term["ended_because"] == "version 2 was promoted"
    assert "until" not in terms(mlflow, "2")[-1]
    assert aliases(mlflow) == {"candidate": 2, "champion": 2}

    said = demoted(home, f"{POLICY}@champion", "ada", "it echoes")
    assert said == "tether-policy/2 is demoted: it echoes. It was candidate and champion; no version is now."
    assert aliases(mlflow) == {}
    (term,) = terms(mlflow, "2")
    assert (term["ended_by"], term["ended_because"]) == ("ada", "it echoes")
    page = mlflow.get_model_version(POLICY, "2").description
    assert (
        "**Demoted**" in page
        and "by ada: it echoes" in page
        and f"Champion from {term['from'][:16].replace('T', ' ')} UTC" in page
    )

    again, _ = pipeline(value=2, win=0.75)  # every stage a hit, the human evaluation's verdict too
    assert aliases(mlflow) == {}, "a run gives a demoted version no alias"
    judged = json.loads(mlflow.get_model_version(POLICY, "2").tags["tether.human_eval"])
    assert (judged["run"], judged["state"]) == (again.run, "passed")

    assert promoted(home, f"{POLICY}/1", "bo", "the best we have") == "tether-policy/1 is champion now."
    assert promoted(home, f"{POLICY}/1", "bo", "twice") == "tether-policy/1 is champion already."
    assert aliases(mlflow) == {"champion": 1}
    assert [(term["by"], "until" in term) for term in terms(mlflow, "1")][-1] == ("bo", False)
    assert len(terms(mlflow, "1")) == 2

    assert promoted(home, f"{POLICY}/2", "bo", "mended") == "tether-policy/2 is champion now, in place of version 1."
    assert "tether.demoted" not in mlflow.get_model_version(POLICY, "2").tags
    assert terms(mlflow, "1")[-1]["ended_by"] == "bo"

    kept = {version: mlflow.get_model_version(POLICY, version).tags for version in ("1", "2")}
    Versions(mlflow).promote(POLICY, "1", "an outage", "held it back", time=1)
    assert {version: mlflow.get_model_version(POLICY, version).tags for version in ("1", "2")} == kept


@pytest.mark.parametrize(
    ("win", "champion"),
    [
        (0.55, 1),  # it lost to the champion
        (0.67, 1),  # 0.67 - 0.6 - sqrt(0.05² + 0.05²) = -0.0007: no gain beyond chance
        (0.68, 2),  # 0.0093
    ],
)
def test_a_policy_becomes_champion_only_if_it_beats_the_champion(pipeline, client, win, champion):
    pipeline(value=1)
    ctx, _ = pipeline(value=2, win=win)
    assert aliases(client()) == {"candidate": 2, "champion": champion}
    decision = Sent.load(ctx.folder).decision
    assert decision.startswith(f"tether-policy/2 {'is champion' if champion == 2 else 'does not become champion'}: ")
    assert f"{win:.3f}" in decision and decision[15:-1].strip() in client().get_model_version(POLICY, "2").tags.values()


def test_win_rates_against_other_sft_models_decide_nothing(pipeline, client):
    pipeline(value=1)
    ctx, _ = pipeline(win=0.9, base=2)
    assert aliases(client())["champion"] == 1
    assert "is against another SFT model" in Sent.load(ctx.folder).decision


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"reward": {}}, "its run does not judge reward accuracy: set gates.reward.accuracy_low"),
        ({"reward": {"accuracy_low": 0.4}}, "does not judge reward accuracy"),  # below chance
        ({"policy": {"kl": None, "reward_gain_low": 0.0}}, "does not judge KL to SFT"),
        ({"policy": {"kl": 8.0}}, "does not judge gain in reward"),
        ({"human_eval": {"win_rate_low": 0.3}}, "does not judge win rate"),
    ],
)
def test_a_policy_that_was_not_judged_gets_no_alias(pipeline, kit, client, home, changed, why):
    ctx, _ = pipeline(judged=kit.judged | changed)
    assert aliases(client()) == {} and why in Sent.load(ctx.folder).decision
    with pytest.raises(UserError, match=why):
        promoted(home, f"{POLICY}/1", "ada", "I like it")
    pipeline()  # the same bytes, judged by thresholds
    assert aliases(client()) == {"candidate": 1, "champion": 1}


def test_violations_that_are_measured_must_be_judged(pipeline, client):
    ctx, _ = pipeline(measured={"policy/rule_violations_excess": "0.2"})
    assert aliases(client()) == {}
    assert "does not judge violations of ppo.rules" in Sent.load(ctx.folder).decision


def test_a_profile_for_trying_things_gives_no_model_an_alias(pipeline, client):
    ctx, _ = pipeline(promote=False)
    assert [dict(each.aliases) for each in client().search_registered_models()] == [{}, {}]
    assert "its profile is for trying things" in Sent.load(ctx.folder).decision


def test_what_people_did_not_let_through_is_not_promoted_by_hand_either(pipeline, kit, client, home):
    with pytest.raises(GateFailed):
        pipeline(kit.thresholds(human_eval={"items": 10.0}))
    with pytest.raises(UserError, match="the human evaluation of tether-policy/1 was gate_failed in run"):
        promoted(home, f"{POLICY}@candidate", "ada", "I like it")
    with pytest.raises(UserError, match="tether-sft/1 is not a policy"):
        promoted(home, "tether-sft", "ada", "I like it")
    with pytest.raises(UserError, match="there are tether-policy/1, tether-sft/1"):
        promoted(home, "tether-policy/7", "ada", "I like it")
    assert aliases(client()) == {"candidate": 1}


def test_thresholds_turned_off_afterwards_let_nobody_promote(pipeline, kit, client, home):
    with pytest.raises(GateFailed):
        pipeline(win=0.45)
    pipeline(win=0.45, judged=kit.judged | {"human_eval": {}})  # tether rerun human_eval --set gates...=null
    assert aliases(client()) == {"candidate": 1}
    with pytest.raises(UserError, match="the human evaluation of tether-policy/1 was gate_failed in run"):
        promoted(home, f"{POLICY}/1", "ada", "I like it")


def test_a_run_that_judges_less_takes_no_passed_evaluation_away(pipeline, kit, client, home):
    pipeline(value=1)
    pipeline(value=2, win=0.61)  # no gain beyond chance
    pipeline(value=2, win=0.61, judged=kit.judged | {"human_eval": {}})
    assert promoted(home, f"{POLICY}/2", "ada", "people like it").startswith("tether-policy/2 is champion now")


def test_a_policy_whose_gate_was_waived_is_promoted_only_by_hand(pipeline, client, home):
    waiver = Waiver(gate="policy.kl", user="ada", reason="close enough")
    ctx, results = pipeline(metrics="9", waivers=[waiver])
    assert results["ppo"].state == "waived" and aliases(client()) == {"candidate": 1}
    assert "does not become champion: waived: policy.kl." in Sent.load(ctx.folder).decision
    assert promoted(home, f"{POLICY}/1", "bo", "we know") == "tether-policy/1 is champion now."


def test_a_champion_of_another_run_meanwhile_has_to_be_beaten_too(pipeline, client, monkeypatch):
    pipeline(value=1)
    pipeline(value=2, win=0.61)  # no gain beyond chance
    mlflow = client()

    def copy(versions, name, version):  # takes minutes for real weights
        if aliases(mlflow)["champion"] == 1:
            mlflow.set_model_version_tag(POLICY, "2", "tether.human_eval", json.dumps(better))
            mlflow.set_registered_model_alias(POLICY, "champion", "2")
        return ""

    better = {**json.loads(mlflow.get_model_version(POLICY, "2").tags["tether.human_eval"]), "win_rate": 0.8,
              "win_rate_low": 0.75, "win_rate_high": 0.85}  # fmt: skip
    monkeypatch.setattr(Versions, "copy_weights", copy)
    pipeline(value=3, win=0.75)
    assert aliases(mlflow)["champion"] == 2


def test_a_policy_on_a_skipped_sft_is_promoted_only_where_its_gates_are_waived(pipeline, kit, client, home, said):
    gates = kit.thresholds(policy={"kl": 8.0}, sft={"loss": 9.0, "ended": 0.1})
    ctx, results = pipeline(gates, train=False)
    assert results["sft"].state == "skipped" and load_status(home, ctx.run).state == "passed"
    assert "SKIPPED sft.loss: the stage sft was skipped, so its gates do not pass (sft/loss_high is missing" in said(
        ctx
    )
    mlflow = client()
    tracked = mlflow.get_run(load_status(home, ctx.run).stage("sft").mlflow_run)
    assert (tracked.data.tags["tether.state"], tracked.info.status) == ("skipped", "FINISHED")
    assert [each.name for each in mlflow.search_registered_models()] == [POLICY], "the base is no SFT model of ours"
    assert aliases(mlflow) == {} and terms(mlflow, "1") == []
    assert "**Not a candidate**" in mlflow.get_model_version(POLICY, "1").description
    with pytest.raises(UserError, match=r"sft\.loss, sft\.ended did not pass.* --waive sft\.loss --waive sft\.ended"):
        promoted(home, f"{POLICY}/1", "ada", "I like it")

    one = [Waiver(gate="sft.loss", user="ada", reason="the base is good")]
    pipeline(gates, train=False, waivers=one)
    assert aliases(client()) == {} and "sft.ended" in mlflow.get_model_version(POLICY, "1").tags["tether.withheld"]
    _, results = pipeline(gates, train=False, waivers=[*one, Waiver(gate="sft.ended", user="ada", reason="too")])
    assert results["sft"].state == "skipped" and aliases(client()) == {"candidate": 1, "champion": 1}
    tags = client().get_model_version(POLICY, "1").tags
    assert "tether.withheld" not in tags and set(json.loads(tags["tether.waivers"])) == {"sft.loss", "sft.ended"}
    pipeline(gates, train=False)
    assert aliases(client()) == {"candidate": 1, "champion": 1}, "what a run has earned, another does not take away"
    assert "tether.withheld" not in client().get_model_version(POLICY, "1").tags


def test_an_evaluation_without_numbers_is_a_sentence_all_the_same():
    judged = {"run": "r", "state": "gate_failed", "judges": "people", "win_rate": None}
    assert evaluation(judged) == "Human evaluation gate_failed in run r, without a win rate"
    judged |= {"win_rate": 0.75, "win_rate_low": 0.505, "win_rate_high": 0.898, "items": 16.0}
    assert evaluation(judged).endswith("win rate 0.750 (0.505 to 0.898) against SFT, n = 16, judges: people")
