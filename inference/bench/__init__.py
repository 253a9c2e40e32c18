"""Benchmarks: prompts in, figures, table and plots out; every method and the autoregressive baseline in one run."""
