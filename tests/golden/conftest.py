"""`--update-golden` rewrites the expected texts; look at the diff before committing it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden/expected")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the file of that name under `expected/`."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "expected" / name
        if request.config.getoption("--update-golden", default=False):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest tests/golden --update-golden"
        assert text == path.read_text(), f"{name} changed; see pytest tests/golden --update-golden"

    return check
