"""Pure functions on tensors: log-probs, advantages, losses, KL."""
