# %% [markdown]
# # The sampler and the learner as a library
#
# PPO's parts work without the pipeline. All it takes is a model, a tokenizer, a source of reward and a loop. Here a
# random model of one layer learns to answer with a word that a verifier asks for, while β keeps it near where it began.

# %%
import copy

import torch
from transformers import LlamaForSequenceClassification

from components.models.config import GenerationConfig, ScratchModel
from components.models.folders import build_causal_lm, frozen
from components.models.runtime import Runtime
from components.models.sampling import sample
from components.models.tokenizers import train_tokenizer
from components.ppo.config import PpoConfig, PpoJob
from components.ppo.experience import gather_experience
from components.ppo.learner import Learner
from components.ppo.models import Models
from components.reward.scoring import ScoreScale
from components.rewards.config import VerifierReward
from components.rewards.verifiers import Verifier
from components.rewards.weighted import Rewards

torch.manual_seed(0)
tokenizer = train_tokenizer(["one two three four five six."], 100)
policy = build_causal_lm(ScratchModel(hidden_size=16, layers=1, heads=2), tokenizer, 16, seed=5)
reference = frozen(copy.deepcopy(policy))
prompt = tokenizer("one two")["input_ids"]

# %% [markdown]
# ## Sample
#
# `sample` takes token ids and returns token ids, masks and log-probabilities. Each response has a number. For one
# prompt and policy, a response depends on the seed and its number alone, not on the other responses of the batch.

# %%
generation = GenerationConfig(max_new_tokens=2)
both = sample(policy, tokenizer, [prompt] * 2, generation, seed=1, numbers=[0, 7])
alone = sample(policy, tokenizer, [prompt], generation, seed=1, numbers=[7])
print(both.response_ids.shape, both.response_mask.dtype)
print("response 7 is the same alone:", torch.equal(both.response_ids[1:], alone.response_ids))

# %% [markdown]
# ## Reward and learn
#
# The reward is 1 if the response says four or five, else 0. β is fixed at 0.1. An update has three calls: `sample`,
# `gather_experience` (log-probabilities, KL, scores) and `learner.update`. `Models` needs a reward model too. This one
# is random and has no part in the reward, since the list of rewards does not name it.

# %%
asked_for = VerifierReward(source="verifier:regex", value="four|five", name="words", shift=0.0, scale=1.0)
rewards = Rewards([asked_for], {"words": Verifier(asked_for)}, units={"words": (0.0, 1.0)})
config = PpoConfig(
    updates=25, batch_size=128, minibatch_size=128, micro_batch_size=128, learning_rate=5e-3, advantage="rloo",
    group_size=4, kl={"control": "fixed", "coefficient": 0.1}, score={"missing_eos": "keep"},
)  # fmt: skip
runtime = Runtime(device="cpu", dtype="float32", threads=1).resolve()
job = PpoJob(seed=0, runtime=runtime, generation=generation, ppo=config)
unit = ScoreScale(shift=0.0, scale=1.0, missing_eos_score=0.0, temperature=1.0, responses=128)
reward_model = frozen(LlamaForSequenceClassification(copy.deepcopy(policy.config)))
reward_model.score = torch.nn.Linear(16, 1, bias=False)
models = Models(policy, reference, reward_model, None, tokenizer, unit, rewards=rewards)
learner = Learner.start(models, job)
asked = [[{"role": "user", "content": "one two"}]] * config.batch_size

print("update  share that says four or five")
for update in range(config.updates):
    numbers = range(config.batch_size * update, config.batch_size * (update + 1))
    samples = sample(policy, tokenizer, [prompt] * config.batch_size, generation, seed=2, numbers=numbers)
    share = sum("four" in text or "five" in text for text in samples.texts(tokenizer)) / config.batch_size
    learner.update(gather_experience(models, samples, job, 0.1, asked), update)
    if update % 8 == 0:
        print(f"{update:6d}  {share:.1f}")
assert share > 0.9, "the policy did not learn what is rewarded"
