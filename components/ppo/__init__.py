"""PPO against the reward model, tethered by KL to the SFT policy."""
