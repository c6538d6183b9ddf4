"""Every step as an event: the bus, the wire form, the recorder."""
