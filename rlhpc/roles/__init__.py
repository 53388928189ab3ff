"""Roles: receive a command, gather columns, run the engine, keep the results."""
