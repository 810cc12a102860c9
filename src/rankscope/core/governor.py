"""Placeholder until the governor lands."""


class Governor:
    def __init__(self, budget, every):
        self._every = every

    def observe(self, step, observed, overhead_seconds_W, step_seconds_W):
        pass

    def interval_at(self, step):
        return self._every
