"""Training engines: log-probs, updates, weights."""
