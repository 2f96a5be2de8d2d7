"""Kernel tests are skipped, with the reason, where no kernel can be built."""

from pathlib import Path

import pytest

from tests.cuda.build import missing

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if reason and HERE in item.path.parents and item.path.name != "test_compile.py":
            item.add_marker(pytest.mark.skip(reason=reason))
