"""Methods without PPO's updates: DPO, IPO and KTO on preference pairs, and best of n."""
