"""Sub-stages that train a judge, or ask the reward model."""
