"""What the labels say: of the policy, of the raters, of the reward model."""
