"""Outputs out: tokens become text, and text streams that users read."""
