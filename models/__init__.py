"""Configurations, checkpoints and the eager models, in plain PyTorch."""
