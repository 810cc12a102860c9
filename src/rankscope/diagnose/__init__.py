"""From evidence to findings, causes and verdicts; no torch and no communication."""
