"""The parts of bench/compare.py: peers of llmserve, models that all can read, workloads, table."""
