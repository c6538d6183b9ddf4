"""Several engines at once: followed, added up, listed."""
