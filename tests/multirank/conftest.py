"""What the tests with real ranks share."""

from collections.abc import Iterator

import pytest

from tests.multirank.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that start with the first test that needs them and serve all of them."""
    ranks = RankPool()
    yield ranks
    ranks.close()
