"""One training's session: what `watch` begins, what collects each step, what `close` ends."""
