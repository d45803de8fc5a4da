"""The suite about itself."""

import conftest


def test_slow_tests_that_are_listed_exist(pytestconfig):
    """In a run of all tests; a part of them cannot tell."""
    assert pytestconfig.stash[conftest.UNKNOWN_SLOW] == []
