"""`cimage compare`: methods trained on one graph, scored by the same probe, beside controls."""
