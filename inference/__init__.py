"""Decoding: one engine for every drafter and for none."""
