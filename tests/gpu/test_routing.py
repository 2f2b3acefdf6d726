"""The routing kernel on a GPU: bit by bit what the reference gives."""

from __future__ import annotations

from nvep.testing.routing_checks import RoutingChecks


class TestRouting(RoutingChecks):
    """The whole suite."""
