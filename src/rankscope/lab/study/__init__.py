"""The paper's experiment: its data, its models, its settings, and the runner.

Importing this package imports neither transformers nor any other package of the extra ``study``:
they are imported where they are used, so that a missing one is a one-line message.
"""
