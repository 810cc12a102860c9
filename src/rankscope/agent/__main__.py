"""``python -m rankscope.agent``: started by ``rankscope.watch``, not by hand."""

from rankscope.agent.process import main

main()
