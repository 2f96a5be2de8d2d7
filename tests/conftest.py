"""Settings of hypothesis: the clock decides nothing, and a failure prints how to repeat it."""

from hypothesis import settings

settings.register_profile("npmoe", deadline=None, print_blob=True)
settings.load_profile("npmoe")
