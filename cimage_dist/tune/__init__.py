"""Hyper-parameter sweeps without Ray.

Spaces, points, the ledger on disk, plans, rankings, results. The runtime executes them.
"""
