"""What the subcommands of `aioengine` do. Each is imported only when it is run."""
