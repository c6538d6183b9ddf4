"""Where a viewer's stream comes from: an engine in this process, a socket, or a recording."""
