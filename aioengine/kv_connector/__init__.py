"""A KV cache beyond the pool: where blocks go that leave it, and where a request's prefix is looked for before it is computed."""
