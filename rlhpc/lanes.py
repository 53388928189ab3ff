r"""Two ordered lanes of a rank: compute (the main thread) and transfer (a thread of its own).

    reader thread of the channel --> inbox of the compute lane  --> main thread: engines, weight
    sync
                                 \-> inbox of the transfer lane --> transfer thread: rows between
                                 ranks

Each lane runs its commands in number order, the same at both ends of a transfer; that is the whole
argument against deadlock.  A command that needs another lane's result waits for it by number.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from rlhpc.comm.messages import Command


class Inbox:
    """Commands of one lane in arrival order, which is number order."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()

    def put(self, command: Command) -> None:
        """Called by the channel's reader thread."""
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def take(self, *, block: bool) -> Command | None:
        """The next command; None when there is none and ``block`` is False."""
        with self._changed:
            while block and not self._commands:
                self._changed.wait()
            return self._commands.popleft() if self._commands else None


class Progress:
    """How far a lane has come.

    The other lane waits for it here.  One number is enough, since lanes keep order.
    """

    def __init__(self) -> None:
        self._last = 0
        self._changed = threading.Condition()

    def advance(self, number: int) -> None:
        """All commands of the lane up to ``number`` are done."""
        with self._changed:
            self._last = number
            self._changed.notify_all()

    def wait_for(self, numbers: tuple[int, ...]) -> None:
        """Block until the lane has done all ``numbers``."""
        if numbers:
            with self._changed:
                self._changed.wait_for(lambda: self._last >= max(numbers))


class TransferLane:
    """Thread that runs transfer commands in order."""

    def __init__(self, run: Callable[[Command], None]) -> None:
        self.inbox = Inbox()
        self.progress = Progress()
        self._run = run
        self._thread = threading.Thread(target=self._loop, name="transfer", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            command = self.inbox.take(block=True)
            assert command is not None
            self._run(command)
            self.progress.advance(command.number)
