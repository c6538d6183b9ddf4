"""The scheduler and the paged KV cache's books: pure Python, no torch, no asyncio, no clock."""
