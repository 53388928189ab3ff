"""Rollout engines: sample responses, report log-probs, take weights in place."""
