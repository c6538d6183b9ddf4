"""Where steps run: the protocol, and one worker thread."""
