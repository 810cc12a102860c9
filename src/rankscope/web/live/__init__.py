"""The live page over one or many runs: ``rankscope serve``."""
