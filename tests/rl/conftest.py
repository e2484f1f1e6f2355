from __future__ import annotations

from hypothesis import settings

# The first torch call of a process takes long, whatever is tested: no deadline per example.
settings.register_profile("rl", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("rl")
