"""Owns the run of the collectives' tests over hosts: what holds on one holds on several.

Tests that take the fixture `transport` are run again, with ranks that believe to be on two hosts.
"""

import pytest

from conftest import Transport
from other_transports import gather_tests
from test_suite_on_hosts import OnHosts

MODULES = ["collectives", "collectives_failures", "collectives_groups", "collectives_inputs"]
# A sender over hosts does not learn that its message was refused.
LEFT_OUT = {"message_of_another_size_raises_on_both"}


@pytest.fixture(scope="session")
def transport() -> Transport:
    return OnHosts("hosts")


globals().update(gather_tests(MODULES, LEFT_OUT))
