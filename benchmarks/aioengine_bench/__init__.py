"""The workloads that aioengine is measured and tested with."""
