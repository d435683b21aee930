"""Versions of registered models: registered if the gates passed, and promoted and demoted with a record of each.

Everything known about a version is in its tags, so its page shows it and one query finds it:

lineage.digest, lineage.NAME_digest   the artifact, and everything it was made from
tether.waivers      gates waived for it: {gate: {user, reason, run}}
tether.human_eval   its human evaluation: {run, state, judges, win_rate, win_rate_low, win_rate_high, items, withheld}
tether.champion     its terms as champion: [{from, by, because, until, ended_by, ended_because}]; the last may be open
tether.demoted      {at, by, because}: no run sets an alias to it again, only a person does
tether.imported     the run that used it with an imported record in its lineage; the same applies
tether.picture      the MLflow run with a picture of its lineage, including its human evaluation if there was one
tether.withheld     {run, why}: gates of a skipped stage without a waiver, or what the run does not judge; no alias is
                    set until a run of the same artifact waives them, or has the thresholds
tether.decision     what its last run decided about its aliases, and why
"""

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from components.base.text import markdown as words
from components.base.text import markdown_code
from components.gates.gate_text import number
from tasks.runs.journal import Done
from tasks.runs.status import finite
from tasks.tracking.mlflow_notes import picture
from tasks.tracking.model_links import MODELS
from tasks.tracking.registered_weights import TAG, Weights

logger = logging.getLogger(__name__)

CANDIDATE, CHAMPION = "candidate", "champion"
_KINDS = {
    "sft": f"Supervised models. `{CANDIDATE}` points at the newest version that passed its gates.",
    "reward": f"Reward models. `{CANDIDATE}` points at the newest version that passed its gates.",
    "policy": f"Policies, trained by PPO under a KL tether to their SFT model. `{CANDIDATE}` points at the newest "
    f"version that passed its automatic gates, `{CHAMPION}` at the policy that passed the human-eval gate and beat the "
    "champion before it (or that a person promoted). A version says from when to when it was champion.",
}
_SHOWN = r"\n\n\*\*\w+\*\*: \[version \d+\]\([^\n)]*\)(\n\n!\[[^\n\]]*\]\([^\n)]*\))?"
"""The text on a registered model's page about one of its versions."""
_MEASURED = ("win_rate", "win_rate_low", "win_rate_high", "items")


class Versions:
    """The registered models of one MLflow. `weights` copies weights for the versions; None if MLflow gets none."""

    def __init__(self, client: Any, weights: Weights | None = None) -> None:
        self._client = client
        self._weights = weights if weights is None or weights.which != "none" else None

    def register(
        self,
        done: Done,
        name: str,
        model: str,
        run: str,
        waivers: Mapping[str, Any],
        withheld: str = "",
        shown_by: str = "",
    ) -> str:
        """Register `done` as a version of `name` if it is new, and set `candidate` to it unless it was set later.

        Args:
            model, run: the ids of the LoggedModel and of the MLflow run that computed it.
            waivers: waivers of this stage and earlier ones in the run that uses it.
            withheld: why `candidate` is not set.
            shown_by: the MLflow run with a picture of the model's lineage, shown until one includes its evaluation.

        Returns:
            What was decided about the alias, in one sentence.
        """
        record = done.record
        registered = self._find(name, record.digest)
        if registered is None:
            tags = {"lineage.digest": record.digest, "tether.key": record.key, "tether.run": record.run, **done.tags}
            if not self._client.search_registered_models(f"name='{name}'"):
                self._client.create_registered_model(name, description=_KINDS[MODELS[done.group]])
            registered = self._client.create_model_version(name, f"models:/{model}", run, tags=tags, model_id=model)
        version = str(registered.version)
        if shown_by and "tether.picture" not in registered.tags:
            self._client.set_model_version_tag(name, version, "tether.picture", shown_by)
        # The model's own page shows its versions from this tag.
        versions = json.dumps([{"name": name, "version": int(version)}])
        self._client.set_logged_model_tags(model, {"mlflow.modelVersions": versions})
        if self._weights is not None and self._weights.which == "all":
            self._put(self._weights, name, version)
        problem = self._no_alias(registered, done, waivers, withheld)
        if not problem:
            self._point(name, CANDIDATE, version, done.time)
        decision = f"is registered without an alias: {problem}" if problem else f"is a {CANDIDATE}"
        return self._decide(name, version, decision)

    def judge(
        self, done: Done, name: str, waivers: Mapping[str, Any], withheld: str = "", shown_by: str = "",
        waived: Collection[str] = (),
    ) -> str:  # fmt: skip
        """Record a human evaluation on the policy that it judged, and decide whether it becomes champion.

        It does if every gate passed without a waiver and it beats the present champion (`_against_champion`). If an
        imported record is in its lineage or gates were `waived`, only a person can promote it; if aliases are
        `withheld`, nobody can, and the evaluation replaces none of a run that judged all.

        Args:
            waived: waived gates of this stage and earlier ones, other than those of a skipped stage.
            shown_by: the MLflow run with a picture of the policy's lineage that includes this evaluation.

        Returns:
            What was decided, in one sentence; empty if the policy is not registered.
        """
        digest = done.lineage.get("ppo")
        registered = self._find(name, digest) if digest else None
        if registered is None:
            return ""
        version = str(registered.version)
        stops = any(verdict.stops for verdict in done.verdicts)
        state = "gate_failed" if stops else "waived" if done.waived else "incomplete" if withheld else "passed"
        measured = finite({short: done.record.metrics.get(f"human_eval/{short}", math.nan) for short in _MEASURED})
        evaluation = {"run": done.run, "state": state, "judges": done.judges, **measured, "at": _utc(done.time)}
        evaluation["withheld"] = bool(withheld)
        if not withheld or human_eval(registered.tags).get("withheld", not human_eval(registered.tags)):
            self._set(name, version, "tether.human_eval", evaluation)
        if shown_by:
            self._client.set_model_version_tag(name, version, "tether.picture", shown_by)
        if problem := self._no_alias(registered, done, waivers, withheld):
            return self._decide(name, version, f"has no new alias: {problem}")
        beats, how = False, "a later decision stands"
        if state != "passed":
            how = f"its human evaluation was {state}"
        elif waived:
            how = f"waived: {', '.join(waived)}. Only a person promotes it (`tether promote {name}/{version}`)"
        elif done.time >= self._pointed(name, CHAMPION):
            beats, how = self._against_champion(name, version)
        if beats:
            self.copy_weights(name, version)
            beats, how = self._against_champion(name, version)  # while weights are copied, another may be promoted
        if not beats:
            return self._decide(name, version, f"does not become champion: {how}")
        # First, so that a call that is repeated after a kill, when the version is champion, finds it.
        decision = self._decide(name, version, f"is {CHAMPION}{how and f': {how}'}")
        because = f"human_eval passed in run {done.run}{how and f', {how}'}"
        self.promote(name, version, done.user, because, done.time, done.run)
        return decision

    def _decide(self, name: str, version: str, text: str) -> str:
        self._client.set_model_version_tag(name, version, "tether.decision", text)
        self.describe(name, version)
        return f"{name}/{version} {text}."

    def _against_champion(self, name: str, version: str) -> tuple[bool, str]:
        """Return whether a judged version beats the champion, and how that is known; without a champion it does.

        Both win rates must be against the same SFT model, by the same kind of judges. Then the lower end of the 95 %
        interval of their difference must be above 0 (Newcombe 1998, Statistics in Medicine 17:873, method 10):

            p - q - sqrt((p - low_p)² + (high_q - q)²)
        """
        before, tags = self._aliases(name).get(CHAMPION), self.tags(name, version)
        if before is None or before == version:
            decided, _, how = tags.get("tether.decision", "").partition(": ")
            return True, how if decided == f"is {CHAMPION}" else ""
        theirs = self.tags(name, before)
        new, old = human_eval(tags), human_eval(theirs)
        sides = [(result.get("judges"), of.get("lineage.sft_digest")) for result, of in ((new, tags), (old, theirs))]
        if sides[0] != sides[1] or any(result.get(key) is None for result in (new, old) for key in _MEASURED[:3]):
            return False, (
                f"the win rate of version {before}, the champion, is against another SFT model, by other judges or "
                f"unknown. Compare both with `tether people compare {name}@{CHAMPION} {name}/{version}`, then "
                f"decide with `tether promote {name}/{version}`"
            )
        rates = " and ".join(
            f"{one['win_rate']:.3f} ({one['win_rate_low']:.3f} to {one['win_rate_high']:.3f})" for one in (new, old)
        )
        low = new["win_rate"] - old["win_rate"]
        low -= math.hypot(new["win_rate"] - new["win_rate_low"], old["win_rate_high"] - old["win_rate"])
        comparison = f"the win rates against the same SFT model are {rates} for version {before}"
        if low > 0:
            return True, f"{comparison}, the champion before"
        override = f"To decide otherwise: `tether promote {name}/{version}`"
        return False, f"{comparison}, the champion: no gain beyond chance. {override}"

    def promote(self, name: str, version: str, by: str, because: str, time: int, run: str = "") -> None:
        """Set `champion` to a version and begin its term; the previous champion's term ends. Older facts are ignored.

        The caller has checked its human evaluation. MLflow gets its weights before it becomes champion.
        """
        if time < self._pointed(name, CHAMPION):
            return
        self.copy_weights(name, version)
        before = self._aliases(name).get(CHAMPION)
        if before is not None and before != version:
            self._end_term(name, before, by, f"version {version} was promoted", time)
            self.describe(name, before)
        tags = self.tags(name, version)
        terms = champion_terms(tags)
        if not terms or "until" in terms[-1]:
            promotion = {"by": by, "at": _utc(time), "run": run, "judges": human_eval(tags).get("judges", "")}
            for tag, value in promotion.items():
                self._client.set_model_version_tag(name, version, f"tether.promoted_{tag}", value)
            # Last, so that a call that is repeated after a kill does not skip the other tags.
            self._set(name, version, "tether.champion", [*terms, {"from": _utc(time), "by": by, "because": because}])
        if "tether.demoted" in tags:
            self._client.delete_model_version_tag(name, version, "tether.demoted")
        self._point(name, CHAMPION, version, time)
        self.describe(name, version)

    def demote(self, name: str, version: str, by: str, because: str, time: int) -> None:
        """Remove every alias from a version and record why. Its history stays, and no run sets an alias to it again."""
        self._set(name, version, "tether.demoted", {"at": _utc(time), "by": by, "because": because})
        self._end_term(name, version, by, because, time)
        for alias, at in self._aliases(name).items():
            if at == version:
                self._client.delete_registered_model_alias(name, alias)
                self._client.set_registered_model_tag(name, f"tether.{alias}_set", str(time))
        self.describe(name, version)

    def copy_weights(self, name: str, version: str) -> str:
        """Copy the weights of a policy, and of the reward model that it was trained against, into MLflow.

        Returns:
            Why MLflow can't have those of the policy; empty if it has them or is not meant to.
        """
        if self._weights is None:
            return ""
        problem = self._put(self._weights, name, version)
        reward, digest = f"{name.removesuffix('-policy')}-reward", self.tags(name, version).get("lineage.reward_digest")
        if digest and (reward_version := self._find(reward, digest)) is not None:
            self._put(self._weights, reward, str(reward_version.version))
        return problem

    def _put(self, weights: Weights, name: str, version: str) -> str:
        source = self._client.get_model_version(name, version).source
        if not source.startswith("models:/"):
            return "an earlier version of Tether registered it without a model"
        model = source.removeprefix("models:/")
        if weights.has(model):
            return ""
        from mlflow.exceptions import MlflowException

        problem = "this user may not write files to MLflow (403)"
        try:
            problem = weights.put(model)
            if not problem:
                self.describe(name, version)
        except MlflowException as error:  # a user who may promote policies may lack permission for reward models
            if error.get_http_status_code() != 403:
                raise
            logger.debug("MLflow: %s", error)
        if problem:
            logger.warning("the weights of %s/%s are not in MLflow: %s", name, version, problem)
        return problem

    def tags(self, name: str, version: str) -> dict[str, str]:
        return dict(self._client.get_model_version(name, version).tags)

    def describe(self, name: str, version: str) -> None:
        """Rewrite a version's description: its state, followed by its model's own note."""
        registered = self._client.get_model_version(name, version)
        note, weights = "", []
        if registered.source.startswith("models:/"):
            model = self._client.get_logged_model(registered.source.removeprefix("models:/"))
            note = model.tags.get("mlflow.note.content", "")
            if TAG in model.tags:
                load = markdown_code(f'mlflow.transformers.load_model("models:/{name}/{version}")')
                weights = [f"- Weights are in MLflow: {load} loads them"]
        shown_by = registered.tags.get("tether.picture", registered.run_id)
        note = note.replace(picture(registered.run_id), picture(shown_by))
        lines = [*state_lines(registered.tags), *weights, ""] if registered.tags else []
        self._client.update_model_version(name, version, "\n".join([*lines, note]).strip())
        self._describe_model(name, version)

    def _describe_model(self, name: str, newest: str) -> None:
        """Show the lineage of a model's champion (or candidate, or `newest`) on the registered model's page.

        A description that a person has changed is left alone.
        """
        about = _KINDS.get(name.rpartition("-")[2], "")
        written = self._client.get_registered_model(name).description or ""
        if not about or not re.fullmatch(rf"({re.escape(about)}({_SHOWN})?)?", written):
            return
        aliases = self._aliases(name)
        alias = next((alias_name for alias_name in (CHAMPION, CANDIDATE) if alias_name in aliases), "newest")
        version = aliases.get(alias, newest)
        registered = self._client.get_model_version(name, version)
        address = f"#/models/{name}/versions/{version}?workflowType=machine_learning"
        text = f"{about}\n\n**{alias.capitalize()}**: [version {version}]({address})"
        if "tether.picture" in registered.tags:  # an earlier version of Tether drew no picture
            text += f"\n\n{picture(registered.tags['tether.picture'])}"
        if text != written:
            self._client.update_registered_model(name, text)

    def _no_alias(self, registered: Any, done: Done, waivers: Mapping[str, Any], withheld: str) -> str:
        """Return why a run may not set an alias to a version by itself; empty if it may. Waivers, an import and
        withheld aliases are recorded as tags."""
        name, version, tags = registered.name, str(registered.version), registered.tags
        if waivers:
            all_waivers = _loaded(tags, "tether.waivers", {})
            all_waivers |= {gate: {**waiver, "run": done.run} for gate, waiver in waivers.items()}
            self._set(name, version, "tether.waivers", all_waivers)
        if done.imported:
            self._client.set_model_version_tag(name, version, "tether.imported", done.run)
        if withheld:
            # One with an alias got it from a run without such a reason that gave the same bytes.
            if version not in self._aliases(name).values():
                self._set(name, version, "tether.withheld", {"run": done.run, "why": withheld})
            return withheld
        if "tether.withheld" in tags:
            self._client.delete_model_version_tag(name, version, "tether.withheld")
        if "tether.demoted" in tags:
            return f"it was demoted, so only a person promotes it (`tether promote {name}/{version}`)"
        return "it, or what it was made from, is imported, so only a person promotes it" if done.imported else ""

    def _find(self, name: str, digest: str) -> Any:
        matches = self._client.search_model_versions(f"name='{name}' and tags.`lineage.digest`='{digest}'")
        return max(matches, key=lambda match: int(match.version), default=None)

    def _aliases(self, name: str) -> dict[str, str]:
        return {alias: str(at) for alias, at in self._client.get_registered_model(name).aliases.items()}

    def _pointed(self, name: str, alias: str) -> int:
        """Return when (ms) an alias was last set or removed."""
        return int(self._client.get_registered_model(name).tags.get(f"tether.{alias}_set", 0))

    def _point(self, name: str, alias: str, version: str, time: int) -> None:
        """Set an alias, unless a later event has set it: results that an outage delayed are not the newest."""
        if time >= self._pointed(name, alias):
            self._client.set_registered_model_alias(name, alias, version)
            self._client.set_registered_model_tag(name, f"tether.{alias}_set", str(time))

    def _end_term(self, name: str, version: str, by: str, because: str, time: int) -> None:
        terms = champion_terms(self.tags(name, version))
        if terms and "until" not in terms[-1]:
            terms[-1] |= {"until": _utc(time), "ended_by": by, "ended_because": because}
            self._set(name, version, "tether.champion", terms)

    def _set(self, name: str, version: str, tag: str, value: Any) -> None:
        self._client.set_model_version_tag(name, version, tag, json.dumps(value, ensure_ascii=False))


def champion_terms(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Return a version's terms as champion, oldest first. A term without `until` is still running."""
    return _loaded(tags, "tether.champion", [])


def human_eval(tags: Mapping[str, str]) -> dict[str, Any]:
    """Return a version's last human evaluation; empty if there was none."""
    return _loaded(tags, "tether.human_eval", {})


def withheld_reason(tags: Mapping[str, str]) -> str:
    """Return what forbids a version's promotion; empty if nothing does."""
    withheld = _loaded(tags, "tether.withheld", {})
    # Earlier versions of Tether listed gates of a skipped stage.
    return f"{withheld.get('why') or ', '.join(withheld['gates'])} (run {withheld['run']})" if withheld else ""


def state_lines(tags: Mapping[str, str]) -> Iterable[str]:
    """Return a version's history from its tags, as Markdown for its page."""
    for term in champion_terms(tags):
        began = f"{_read(term['from'])}: by {words(term['by'])}, {words(term['because'])}"
        if "until" in term:
            ended = f"{_read(term['until'])}: by {words(term['ended_by'])}, {words(term['ended_because'])}"
            yield f"- Champion from {began}; until {ended}"
        else:
            yield f"- **Champion** since {began}"
    if demoted := _loaded(tags, "tether.demoted", {}):
        yield f"- **Demoted** {_read(demoted['at'])} by {words(demoted['by'])}: {words(demoted['because'])}"
    if "tether.imported" in tags:
        yield (
            f"- **Imported**: run {words(tags['tether.imported'])} has it, or what it was made from, from another "
            f"home, so no run gives it an alias; `tether promote` does"
        )
    if why := withheld_reason(tags):
        yield f"- **Not a candidate**: {words(why)}"
    if measured := human_eval(tags):
        yield f"- {words(evaluation(measured))}"
    if decision := tags.get("tether.decision"):
        yield f"- Its last run decided: it {words(decision)}"
    for gate, waiver in _loaded(tags, "tether.waivers", {}).items():
        by = f"{words(waiver['user'])} in run {words(waiver['run'])}"
        yield f"- Gate {markdown_code(gate)} was waived by {by}: {words(waiver['reason'])}"


def evaluation(measured: Mapping[str, Any]) -> str:
    """Return a human evaluation in one sentence."""
    if measured["win_rate"] is None:
        return f"Human evaluation {measured['state']} in run {measured['run']}, without a win rate"
    interval = ""
    if measured["win_rate_low"] is not None and measured["win_rate_high"] is not None:
        interval = f" ({measured['win_rate_low']:.3f} to {measured['win_rate_high']:.3f})"
    return (
        f"Human evaluation {measured['state']} in run {measured['run']}: win rate {measured['win_rate']:.3f}{interval} "
        f"against SFT, n = {number(measured['items'] or 0)}, judges: {measured['judges']}"
    )


def _loaded(tags: Mapping[str, str], tag: str, default: Any) -> Any:
    return json.loads(tags[tag]) if tag in tags else default


def _read(time: str) -> str:
    """Return an ISO time in the form `2026-11-25 03:35 UTC`; any other text unchanged."""
    try:
        return f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except ValueError:
        return words(time)


def _utc(time: int) -> str:
    """Return milliseconds since 1970 as ISO 8601, to the second."""
    return datetime.fromtimestamp(time / 1000, UTC).isoformat(timespec="seconds")
