"""Recordings: written step by step, read back all at once or place by place."""
