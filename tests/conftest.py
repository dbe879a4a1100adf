"""Hypothesis profiles, shared fixtures. `HYPOTHESIS_PROFILE=nightly` draws ten times as many examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.fixtures_checkpoint import checkpoint, engine  # noqa: F401  (fixtures)

_fine = [
    HealthCheck.too_slow, HealthCheck.data_too_large,
    HealthCheck.differing_executors, HealthCheck.function_scoped_fixture,
]  # fmt: skip
settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, suppress_health_check=_fine)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=_fine)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
