"""The monitor's own processes: one agent per host receives steps; the root among them judges them.

No torch is imported here. A training process only holds its end of a local socket
(:mod:`rankscope.agent.link`).
"""
