"""Runs a recording again: the scheduler's frames, and the worker's tokens."""
