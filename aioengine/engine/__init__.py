"""The asyncio side: the step loop (`loop`), requests in (`inputs`), outputs out (`outputs`), and `AsyncEngine` over them."""
