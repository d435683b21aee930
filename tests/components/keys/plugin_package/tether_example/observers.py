"""Observers of PPO: `ppo.observers=[words, brevity]`."""


class Words:
    """Counts words, as a metric."""

    def __init__(self):
        self.total = 0

    def on_update(self, update):
        """Add the mean of this update, and of all so far."""
        mean = sum(len(text.split()) for text in update.texts) / len(update.texts)
        self.total += mean
        return update.with_metrics({"ppo/words": mean, "ppo/words_so_far": self.total / update.number})

    def state(self):
        return self.total

    def restore(self, state):
        self.total = state


class Brevity:
    """Stops a run in which KL rises above a tenth of a nat."""

    def on_update(self, update):
        return update.with_stop("KL is above 0.1") if update.metrics["ppo/kl"] > 0.1 else update
