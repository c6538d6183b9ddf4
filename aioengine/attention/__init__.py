"""Attention over the paged KV cache, one file a backend."""
