"""Initial-label methods: a cluster id and a confidence for every node, from features and graph
alone (§6.1, §6.3, §6.4).
"""
