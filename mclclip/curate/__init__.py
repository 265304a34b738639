"""Which samples to look at and which to train on, by their embeddings: verbs filter, blindspots."""
