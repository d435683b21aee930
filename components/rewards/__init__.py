"""Sources of PPO's reward: the pipeline's own model, other models, functions, HTTP scorers and verifiers."""
