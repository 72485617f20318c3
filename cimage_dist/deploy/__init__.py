"""Kubernetes manifests: built by kustomize from k8s/, fitted to a config, checked. No Ray here."""
