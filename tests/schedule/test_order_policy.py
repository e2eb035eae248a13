"""The policy that changes a running job's order: it switches when that pays, returns, and does no harm when nothing is sure."""

from __future__ import annotations

import random

import pytest

from helixrt.errors import ConfigError
from helixrt.schedule.adaptation.judge import Observed, Question, judge
from helixrt.schedule.adaptation.policy import Adaptation, Ask, OrderPolicy, Stay, Switch, differs
from helixrt.schedule.costs import uniform, with_delays
from helixrt.schedule.exchange.as_json import key_of, order_key, order_text, read
from helixrt.schedule.generators.classic import build
from helixrt.schedule.simulate import makespan_ms
from tests.schedule.order_world import OrderWorld, both
