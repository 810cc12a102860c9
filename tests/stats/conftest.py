from hypothesis import settings

settings.register_profile("stats", deadline=None, max_examples=60)
settings.load_profile("stats")
