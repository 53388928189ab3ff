"""Numbers in text, for graders that compare values rather than spelling."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def parse_number(text: str) -> Decimal | None:
    """The value of a number such as `-1,234.50` or `$18`; None when ``text`` is none."""
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    return Decimal(text.replace(",", "").replace("$", ""))


def find_numbers(text: str) -> list[Decimal]:
    """Every number in ``text``, in order.

    A minus after a digit or letter is taken for a dash or an operator.
    """
    found = []
    for match in _NUMBER.finditer(text):
        word, start = match.group(), match.start()
        if word[0] == "-" and start > 0 and text[start - 1].isalnum():
            word = word[1:]
        found.append(Decimal(word.rstrip(",").replace(",", "").replace("$", "")))
    return found


def marked_number(text: str) -> Decimal | None:
    """The number after the last `####`, None when there is none."""
    _, marker, tail = text.rpartition("####")
    if not marker:
        return None
    match = _NUMBER.match(tail.lstrip())
    return None if match is None else find_numbers(match.group())[0]
