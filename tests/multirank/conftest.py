"""What the tests with real ranks share."""

from collections.abc import Iterator

import pytest

from tests import shared_cache
from tests.multirank.network import Network, NotPermittedError
from tests.multirank.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that start with the first test that needs them and serve all of them."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts, which are gone after the test; the test is skipped where they cannot be made."""
    try:
        made = Network()
    except NotPermittedError as reason:
        pytest.skip(f"NOT TESTED with two hosts, since they cannot be made here: {reason}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def cache() -> str:
    """The folder of the traces that all jobs of a run share."""
    return str(shared_cache.FOLDER)
