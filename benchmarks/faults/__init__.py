"""The fault bench: the catalogue of faults as code, which runs on real ranks.

Each fault is a few lines that change one hook of a small training job, so that it reads like its
sentence in ``catalogue.toml``. The monitor meets it through the public API only. In a checkout,
``python -m benchmarks.faults D5 T2`` injects two faults, ``make faults`` all. Imports in here are
relative, since scripts beside this folder know it as ``faults``.
"""
