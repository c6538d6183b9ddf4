"""The asyncio side: requests in, the step loop, outputs out."""
