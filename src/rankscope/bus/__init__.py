"""What every part of the monitor knows: evidence, columns, steps, messages, findings."""
