"""A source of reward: `ppo.rewards=[{source: plugin:short}]`."""


def short(prompts, responses, rows):
    """One score for each response; more is better."""
    return [-float(len(response)) for response in responses]
