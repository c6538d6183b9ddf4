"""The real scheduler on a virtual clock: what a run would have been with other settings, other traffic, another machine."""
