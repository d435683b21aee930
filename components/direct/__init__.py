"""Direct preference methods (DPO, IPO, KTO): train the policy on preference pairs, without sampling from it."""
