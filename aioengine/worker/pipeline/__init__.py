"""How a step's inputs get to where the model runs, and its tokens back: on the host's own arrays, or on a device behind it."""
