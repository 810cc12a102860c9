"""What the runner of code blocks must know about single pages: prepared names, and exceptions."""

MINUTES = "takes minutes"
OUTPUT = "what a command prints"
PLACEHOLDER = "stands for the reader's own script"
IN_RANKS = "run by tests/integrations/test_run_ranks.py"
SERVER = "a server: tests/report/live run it"

PROGRAMS = {
    "pip": "installs packages: .ci/packaging does",
    "python3": "makes an environment: .ci/packaging does",
    "make": "run by .ci/run",
    "torchrun": "starts processes of its own; tests of what it starts do",
    "python": "an example, run by tests, or a benchmark, for a quiet machine",
    "duckdb": "its query is run by tests/test_docs.py",
    **dict.fromkeys(("curl", "jq", "ssh"), "a program of others"),
}
"""By program: why its commands are not run here. Examples of frameworks' pages are run in the ranks
that the tests in ADAPTERS start, those of docs/start.md by tests/test_package.py."""

NOT_RUN = {
    "README.md: ◆ ERROR": OUTPUT,
    "docs/doctor.md: ✓": OUTPUT,
    "docs/integrations/run.md: rankscope run": IN_RANKS,
    "docs/integrations/run.md: rankscope: error": OUTPUT,
    "docs/live.md: rankscope serve": SERVER,
    "docs/numerics.md: rankscope numerics --output": MINUTES,
    "docs/numerics.md: rankscope numerics --training": MINUTES,
    "docs/parity.md: rankscope parity -a": PLACEHOLDER,
    "docs/parity.md: rankscope run --run-dir": PLACEHOLDER,
    "docs/runs.md: rankscope report s3:": "run by tests/record/test_stores.py",
    "docs/study.md: rankscope study --data": MINUTES,
}
"""By page, and how the command line or the block begins: why it is not run."""

ADAPTERS = {
    "docs/integrations/accelerate.md": "tests/integrations/test_hugging_face.py",
    "docs/integrations/deepspeed.md": "tests/integrations/test_deepspeed_adapter.py",
    "docs/integrations/lightning.md": "tests/integrations/test_lightning.py",
    "docs/integrations/ray.md": "tests/integrations/test_ray.py",
    "docs/integrations/torchtitan.md": "tests/integrations/test_torchtitan.py",
    "docs/integrations/transformers.md": "tests/integrations/test_hugging_face.py",
}
"""Pages whose Python needs a framework's own launch: the tests in whose ranks every block runs."""
