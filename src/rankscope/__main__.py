"""``python -m rankscope`` is the command ``rankscope``."""

from rankscope.cli.main import run

if __name__ == "__main__":
    run()
