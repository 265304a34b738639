"""Evaluates encoders on data sets and writes rows of results.jsonl; independent of training.

The package is imported as ``mclclip.eval``. ``protocols`` has one module per protocol. ``images``,
``captions`` and ``items`` read data sets; ``features`` extracts features and ranks by them;
``metrics`` has formulas in pure numpy; ``outcomes`` stores the outcome of every item and compares
encoders by them; ``results`` reads and writes the rows. The verb is ``mclclip/verbs/eval.py``.
"""
