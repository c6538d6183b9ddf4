"""Finding, reading and building models, one file a family."""
