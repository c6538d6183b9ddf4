"""What callers pass, checked: plain values, the fields of a request, and parameters that contradict each other."""
