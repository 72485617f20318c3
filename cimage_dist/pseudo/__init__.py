"""Initial-label methods: a cluster id and a confidence for every node, from features and graph alone (§1, §9, §10)."""
