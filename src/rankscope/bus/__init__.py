"""Types that all parts share: evidence, columns, steps, messages, findings."""
