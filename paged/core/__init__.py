"""Decisions: requests, sequences, blocks, policies, plans and the scheduler. Pure Python, no torch."""
