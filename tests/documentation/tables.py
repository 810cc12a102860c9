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
    ("docs/runs.md", "rankscope report s3://bucket/runs/sft"): "run by tests/record/test_stores.py",
    (
        "docs/integrations/run.md",
        "rankscope run -- torchrun --nproc-per-node 8 train.py --lr 3e-4",
    ): IN_RANKS,
    ("docs/integrations/run.md", "rankscope run lightning_script.py"): IN_RANKS,
    ("docs/live.md", "rankscope serve runs/"): SERVER,
    ("docs/live.md", "rankscope serve runs/ --host 0.0.0.0"): SERVER,
    (
        "docs/integrations/run.md",
        "rankscope: error: Ranks 0 and 1 trained on identical batches in 1 step: the job did "
        "the work of 1 worker, not of 2. [data.duplicate_batches, since step 0]",
    ): OUTPUT,
    ("README.md", "◆ ERROR  sft"): OUTPUT,
    (
        "docs/parity.md",
        'rankscope parity -a "python train.py --batch 32" '
        '-b "torchrun --nproc-per-node 4 train.py --batch 8" --steps 5',
    ): PLACEHOLDER,
    (
        "docs/parity.md",
        'rankscope parity -a "python a.py" -b "python b.py" --map "layers.*.qkv.weight='
        'layers.*.q.weight,layers.*.k.weight,layers.*.v.weight"',
    ): PLACEHOLDER,
    ("docs/parity.md", "rankscope run --run-dir runs/trusted --parity 5 train.py"): PLACEHOLDER,
    (
        "docs/parity.md",
        'rankscope parity -a runs/trusted -b "torchrun --nproc-per-node 2 train.py"',
    ): PLACEHOLDER,
    (
        "docs/parity.md",
        'rankscope parity -a "python train.py" -b "python train.py --save-at 3" '
        '-b2 "python train.py --resume" --steps 6 --resume-at 3',
    ): PLACEHOLDER,
    ("docs/doctor.md", "✓  Ranks and devices    3 ranks on node-7, CPU"): OUTPUT,
    ("docs/numerics.md", "rankscope numerics --output numerics"): MINUTES,
    ("docs/numerics.md", "rankscope numerics --training-steps 0"): MINUTES,
    (
        "docs/study.md",
        "rankscope study --data alpaca_data.json --steps 300 --output runs/alpaca",
    ): MINUTES,
}
"""By page, and the command line or the block's first line: why it is not run."""

ADAPTERS = {
    "docs/integrations/accelerate.md": "tests/integrations/test_hugging_face.py",
    "docs/integrations/deepspeed.md": "tests/integrations/test_deepspeed_adapter.py",
    "docs/integrations/lightning.md": "tests/integrations/test_lightning.py",
    "docs/integrations/ray.md": "tests/integrations/test_ray.py",
    "docs/integrations/torchtitan.md": "tests/integrations/test_torchtitan.py",
    "docs/integrations/transformers.md": "tests/integrations/test_hugging_face.py",
}
"""Pages whose Python needs a framework's own launch: the tests in whose ranks every block runs."""
