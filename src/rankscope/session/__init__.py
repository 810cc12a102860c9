"""One training's session, from `watch` to `close`: it collects each step."""
