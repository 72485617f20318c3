"""Hyper-parameter sweeps without Ray: spaces, points, the ledger on disk, plans, rankings, results.
The runtime executes them.
"""
