"""The controller: rank 0 runs the stage graph; it knows no engine and holds no token tensor."""

from rlhpc.controller.loop import Controller

__all__ = ["Controller"]
