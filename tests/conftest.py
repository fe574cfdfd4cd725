"""What the whole suite shares: hypothesis profiles, and one tiny model, made and compiled once."""

from __future__ import annotations

import os

from hypothesis import settings

# Shared machines stall: no example has a deadline. In CI the same examples run every time.
settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("soak", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
