"""Settings of every test process: two of them share two cores, as each other's busy machine."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Before torch is loaded: its threads must not spin while they wait for one that has no core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
