"""Figures about features, as functions of arrays: no options, no files, no pictures."""
