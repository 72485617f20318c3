"""Kubernetes manifests: rendered from k8s/, fitted to a config, checked for what only the operator would complain of. No Ray here."""
