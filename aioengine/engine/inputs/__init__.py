"""Requests in: prompts and parameters checked, tokenised, admitted and handed to the core."""
