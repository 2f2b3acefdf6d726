"""Dispatch and combine."""

from nvep.config import ExchangeConfig
from nvep.exchange.arrivals import Arrivals
from nvep.exchange.exchange import Exchange
from nvep.exchange.failures import Statistics

__all__ = ["Arrivals", "Exchange", "ExchangeConfig", "Statistics"]
