"""Provokes real failures of training runs and records their logs: `python -m tests.corpus.provoke NAME… | --all`."""
