"""The parts of the dashboard's state: plain Python, no textual, no asyncio."""
