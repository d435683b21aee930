# %% [markdown]
# # A run from Python, and its metrics as data frames
#
# `flows.api` does what the commands do. The profile `tiny` takes a minute; it learns next to nothing, so look at
# the shapes and not at the numbers. The lesson works in a home of its own, which it removes. A run prints its progress;
# `quiet` keeps it off this page.

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
# `metrics()` has a row a metric, `gates()` a row a gate, `curves(STAGE)` a column a metric by step.

# %%
metrics = first.metrics()
print(metrics.groupby("stage", sort=False).size().to_string())
gates = first.gates()
print(gates[~gates["off"]].head(4)[["gate", "passed", "value", "threshold"]].to_string(index=False))
print(first.curves("ppo")[["ppo/kl", "ppo/beta"]].round(3).to_string())

# %% [markdown]
# ## Compute one stage again
#
# `rerun` takes the earlier stages from the first run. Only ppo is computed.

# %%
with quiet:
    second = rerun("ppo", first, {"ppo.kl.coefficient": 1.0}, until="ppo")
print({stage.name: "reused" if stage.cached else stage.state for stage in second.status.stages})
both = first.metrics().merge(second.metrics(), on=["stage", "metric"], suffixes=("_first", "_second"))
print(both[both["metric"].isin(["ppo/kl", "ppo/reward_gain"])].round(3).to_string(index=False))

# %% [markdown]
# ## What it was made of

# %%
print(load_run().id == second.id)
print(sorted({node.as_json().get("stage") or "input" for node in lineage(second.artifact("ppo").name).nodes}))
home.cleanup()
