"""Logits to tokens, one feature a file."""
