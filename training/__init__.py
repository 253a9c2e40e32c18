"""The trainer of drafters, what it evaluates and writes, and its entry points."""
