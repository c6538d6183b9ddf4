"""Every step as an event: the bus, the wire form, recordings, and sources of events for viewers."""
