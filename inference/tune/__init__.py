"""Tuning: which draft tree is fastest for this target, this drafter and this machine, measured and stored."""
