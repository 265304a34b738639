"""Verb: index + labels -> checkpoints. One loop for every method."""

from mclclip.train.parts import build_model, check_pixels
from mclclip.train.verb import run

__all__ = ["build_model", "check_pixels", "run"]
