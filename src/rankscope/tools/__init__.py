"""Products around the monitor: doctor, diff, replay."""
