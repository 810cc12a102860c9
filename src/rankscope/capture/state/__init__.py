"""What should be equal on all workers, read exactly: model state, random generators, settings."""
