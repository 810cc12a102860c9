"""The fault catalogue as code, and the bench that runs it on real ranks.

Each fault is a few lines that change one hook of a small training job, so that it reads like its
sentence in ``catalogue.toml``. The monitor meets it through the public API only.
"""
