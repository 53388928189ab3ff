"""Slurm: job script, Submitit executor, environment, inventory and job state."""
