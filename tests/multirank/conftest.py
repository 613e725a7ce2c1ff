"""What the tests with real ranks share."""

from collections.abc import Iterator

import pytest

from tests import nccl_rules, shared_cache
from tests.multirank.network import Network, NotPermittedError
from tests.multirank.ranks import LIMIT_S, SLOW_LIMIT_S, RankPool


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


@pytest.fixture(autouse=True)
def _limit(request: pytest.FixtureRequest) -> None:
    """Give jobs of the slow tier, which have many cases, more time."""
    if "pool" in request.fixturenames:
        is_slow = request.node.get_closest_marker("slow") is not None
        request.getfixturevalue("pool").limit_s = SLOW_LIMIT_S if is_slow else LIMIT_S


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
