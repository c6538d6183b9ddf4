"""A whole recording as data, and what is made of it: a trace, a report, a comparison."""
