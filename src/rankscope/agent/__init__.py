"""The monitor's own process: one per host takes measured steps, the root among them judges them.

No torch is imported here. What a training process holds of it is its end of a local socket
(:mod:`rankscope.agent.link`).
"""
