"""Failing assertions of the shared suite explain themselves as those of test modules do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.collectives.exchange_conformance", "tests.collectives.queue_endpoint")
