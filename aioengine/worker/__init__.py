"""The worker's side of a step: slot tables, input batch, forward, sampling."""
