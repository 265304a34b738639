"""Verb: index + labels -> checkpoints. One loop for every method."""
