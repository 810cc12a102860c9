"""What the runner of code blocks must know about single pages: prepared names, and exceptions.

Every block and every command line that is not run stands in ``NOT_RUN``, with the reason. A test
holds the table to what is there: what is missing in it fails, and what is too much in it fails.
"""

ELSEWHERE = "run by tests/test_package.py, with fewer steps"
INSTALLS = "installs packages: .ci/packaging does"
MINUTES = "takes minutes"
OUTPUT = "what a command prints"
IN_RANKS = "run by the test that ADAPTERS names, in the ranks that it starts, with fewer steps"
OTHERS = "a program of others"
PLACEHOLDER = "stands for the reader's own script"
BENCHMARK = "measures: for a quiet machine"
TORCHRUN = "starts processes of its own; tests of that command do"

NOT_RUN = {
    (
        "docs/runs.md",
        "rankscope report s3://bucket/runs/sft",
    ): "run by tests/record/test_stores.py",
    (
        "docs/integrations/run.md",
        "torchrun --nproc-per-node 8 -m rankscope run train.py --lr 3e-4",
    ): "run by tests/integrations/test_run_ranks.py",
    (
        "docs/integrations/run.md",
        "rankscope run -- torchrun --nproc-per-node 8 train.py --lr 3e-4",
    ): "run by tests/integrations/test_run_ranks.py",
    (
        "docs/integrations/run.md",
        "rankscope run lightning_script.py",
    ): "run by tests/integrations/test_run_ranks.py",
    ("docs/live.md", "pip install '.[serve]'"): INSTALLS,
    ("docs/live.md", "rankscope serve runs/"): "a server: tests/web run it",
    ("docs/live.md", "ssh -L 8321:localhost:8321 the-training-host"): "a program of others",
    ("docs/live.md", "rankscope serve runs/ --host 0.0.0.0"): "a server: tests/web run it",
    (
        "docs/integrations/run.md",
        "rankscope: error: Ranks 0 and 1 trained on identical batches in 1 step: the job did "
        "the work of 1 worker, not of 2. [data.duplicate_batches, since step 0]",
    ): OUTPUT,
    ("README.md", "◆ ERROR  sft"): OUTPUT,
    (
        "README.md",
        "torchrun --nproc-per-node 8 -m rankscope run train.py --lr 3e-4",
    ): "run by tests/integrations/test_run_ranks.py",
    ("README.md", "make demo"): "run by .ci/run",
    ("README.md", "make test"): "run by .ci/run",
    ("README.md", "pip install '.[all]'"): INSTALLS,
    ("docs/index.md", "pip install '.[all]'"): INSTALLS,
    ("CONTRIBUTING.md", "make check"): "run by .ci/run",
    ("CONTRIBUTING.md", "make test"): "run by .ci/run",
    ("CONTRIBUTING.md", "make demo"): "run by .ci/run",
    (
        "docs/canary.md",
        "torchrun --nproc-per-node 8 -m rankscope replay "
        "RUN/replay/rank-2-step-66 --model my_model:make",
    ): TORCHRUN,
    (
        "docs/clusters.md",
        "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint node-0:29500 "
        "-m rankscope run train.py",
    ): PLACEHOLDER,
    (
        "docs/verify.md",
        "torchrun --nproc-per-node 2 -m rankscope run --run-dir runs/ci --verify-at 20 train.py",
    ): PLACEHOLDER,
    ("docs/diff.md", "torchrun --nproc-per-node 4 train.py --run-dir runs/first"): PLACEHOLDER,
    ("docs/diff.md", "torchrun --nproc-per-node 4 train.py --run-dir runs/second"): PLACEHOLDER,
    ("docs/diff.md", "python benchmarks/diff_pairs.py --seeds 3"): BENCHMARK,
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
    ("docs/parity.md", "python benchmarks/parity_frameworks.py"): BENCHMARK,
    ("docs/parity.md", "python benchmarks/parity_cost.py --rounds 1"): BENCHMARK,
    ("docs/parity.md", "python benchmarks/parity_cost.py --memory"): BENCHMARK,
    ("docs/parity.md", "PYTHONPATH=tests python benchmarks/parity_pairs.py --seeds 3"): BENCHMARK,
    ("docs/doctor.md", "torchrun --nproc-per-node 4 -m rankscope doctor"): TORCHRUN,
    (
        "docs/doctor.md",
        "torchrun --nproc-per-node 4 -m rankscope doctor --model train:build_model "
        "--loader train:build_loader",
    ): TORCHRUN,
    ("docs/doctor.md", "✓  Ranks and devices    3 ranks on node-7, CPU"): OUTPUT,
    (
        "docs/integrations/deepspeed.md",
        "torchrun --nproc-per-node 2 examples/deepspeed_zero.py "
        "--scale-rate --run-dir runs/deepspeed-fault",
    ): IN_RANKS,
    (
        "docs/integrations/lightning.md",
        "python examples/lightning_one_line.py --forget-sampler --run-dir runs/lightning-fault",
    ): IN_RANKS,
    ("docs/integrations/prometheus.md", "pip install '.[prometheus]'"): INSTALLS,
    ("docs/integrations/prometheus.md", "curl http://127.0.0.1:9500/metrics"): OTHERS,
    (
        "docs/integrations/prometheus.md",
        "python -m rankscope.sinks.grafana > rankscope-dashboard.json",
    ): "run by tests/sinks/test_live.py",
    (
        "docs/integrations/accelerate.md",
        "torchrun --nproc-per-node 2 examples/accelerate_loop.py --unprepared --run-dir runs/twins",
    ): IN_RANKS,
    (
        "docs/integrations/transformers.md",
        "torchrun --nproc-per-node 2 examples/trainer_one_line.py "
        "--own-loss --run-dir runs/trainer-fault",
    ): IN_RANKS,
    (
        "docs/integrations/transformers.md",
        "torchrun --nproc-per-node 2 examples/trl_sft.py --other-rate --run-dir runs/trl-fault",
    ): IN_RANKS,
    (
        "docs/integrations/ray.md",
        "python examples/ray_train.py --scale-rate",
    ): "starts a Ray of its own, some ten processes: its test trains the same way in one",
    (
        "docs/integrations/torchtitan.md",
        "torchrun --nproc-per-node 2 examples/torchtitan_style.py "
        "--same-shard --run-dir runs/fault",
    ): IN_RANKS,
    (
        "docs/integrations/trackers.md",
        "jq -c 'select(.finding) | .finding | [.severity, .cause, .ranks]' runs/sft/metrics.jsonl",
    ): OTHERS,
    (
        "docs/integrations/trackers.md",
        "jq -r 'select(.step) | [.step, .[\"rankscope/loss_std\"]] | @tsv' runs/sft/metrics.jsonl",
    ): OTHERS,
    (
        "docs/runs.md",
        'duckdb -c "select last_step, rank, loss_high from '
        "'RUN/rollups/64/*.parquet' order by loss_high desc limit 5\"",
    ): "run by tests/test_docs.py",
    ("docs/metrics.md", "python -m benchmarks.faults H1 D5 D20 --keep pictures"): BENCHMARK,
    ("docs/metrics.md", "python benchmarks/pictures.py pictures docs/assets"): BENCHMARK,
    ("docs/numerics.md", "rankscope numerics --output numerics"): MINUTES,
    ("docs/numerics.md", "rankscope numerics --training-steps 0"): MINUTES,
    (
        "docs/numerics.md",
        "python benchmarks/rounding_growth.py --output growth.json --figures figures",
    ): BENCHMARK,
    (
        "docs/runs.md",
        "duckdb -c \"select step, loss_mean, cosine_mean from 'RUN/steps/*.parquet' "
        'order by step"',
    ): "run by tests/test_docs.py",
    ("docs/start.md", "python3 -m venv .venv"): INSTALLS,
    ("docs/start.md", ".venv/bin/pip install '.[web]'"): INSTALLS,
    ("docs/start.md", ".venv/bin/torchrun --nproc-per-node 4 examples/ddp_two_lines.py"): ELSEWHERE,
    (
        "docs/start.md",
        ".venv/bin/torchrun --nproc-per-node 4 examples/ddp_two_lines.py "
        "--forget-sampler --run-dir runs/fault",
    ): ELSEWHERE,
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

PLAIN_MODEL = {"docs/reproducible.md"}
"""Pages whose blocks wrap the model themselves."""

RECORDED = {
    "docs/runs.md": ("runs/sft",),
}
"""Runs that a page reads."""

AFTERWARDS = {
    ("docs/diff.md", "from rankscope import Run"): "assert callable(assert_same_training)",
}
"""What calls a function that a block only defines."""
