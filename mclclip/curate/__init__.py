"""Verbs filter and blindspots: samples to train on and to look at, by their embeddings."""
