"""The layers that model families are made of."""
