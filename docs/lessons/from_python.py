# %% [markdown]
# # A run from Python, and its metrics as data frames
#
# `flows.api` does what the commands do, and returns data frames. The profile `tiny` takes a minute and learns next to
# nothing, so look at the shapes and not at the numbers. The lesson works in a temporary home. A run prints its
# progress; `quiet` keeps that off this page.

# %%
import contextlib
import io
import tempfile

from flows.api import lineage, load_run, rerun, run

home = tempfile.TemporaryDirectory()
quiet = contextlib.redirect_stdout(io.StringIO())
with quiet:
    first = run("tiny", {"seed": 1}, until="ppo", home=home.name)
print(first.state)

# %% [markdown]
# ## Metrics, gates and curves
#
# `metrics()` has one row per metric, `gates()` one row per gate, and `curves(STAGE)` one column per metric, by step. At
# the first step KL is 0 but for rounding, since the policy still is the SFT model.

# %%
metrics = first.metrics()
print(metrics.groupby("stage", sort=False).size().to_string())
gates = first.gates()
print(gates[~gates["off"]].head(4)[["gate", "passed", "value", "threshold"]].to_string(index=False))
print(first.curves("ppo")[["ppo/kl", "ppo/beta"]].round(3).to_string())

# %% [markdown]
# ## Compute one stage again
#
# `rerun` reuses the earlier stages of the first run and computes ppo alone, here with a ten times larger β. The
# metrics of two runs can be joined like any data frames.

# %%
with quiet:
    second = rerun("ppo", first, {"ppo.kl.coefficient": 1.0}, until="ppo")
print({stage.name: "reused" if stage.cached else stage.state for stage in second.status.stages})
both = first.metrics().merge(second.metrics(), on=["stage", "metric"], suffixes=("_first", "_second"))
print(both[both["metric"].isin(["policy/kl", "policy/reward_gain"])].round(3).to_string(index=False))

# %% [markdown]
# ## What it was made of
#
# `load_run` without a name loads the newest run. `lineage` returns everything that an artifact was computed from.

# %%
print(load_run().id == second.id)
print(sorted({node.as_json().get("stage") or "input" for node in lineage(second.artifact("ppo").name).nodes}))
home.cleanup()
