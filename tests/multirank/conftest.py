"""What the tests with real ranks share."""

from collections.abc import Iterator

import pytest

from tests import nccl_rules, shared_cache
from tests.multirank.network import Network, NotPermittedError
from tests.multirank.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that start with the first test that needs them and serve all of them."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Connect the ranks of a test that is marked so by groups that keep NCCL's rules."""
    if request.node.get_closest_marker("drains_tp") is not None:
        if request.getfixturevalue("pool").backend == nccl_rules.NAME:
            pytest.skip("NOT TESTED by NCCL's rules: a drain catches collectives below Python")
        yield
        return
    if request.node.get_closest_marker("nccl_rules") is None:
        yield
        return
    ranks = request.getfixturevalue("pool")
    before, ranks.backend = ranks.backend, nccl_rules.NAME
    yield
    ranks.backend = before


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
