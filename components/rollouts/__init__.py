"""Where PPO's responses are sampled: in this process, or by a vLLM server that gets the weights after each update."""
