"""Evaluation of an encoder on data sets, as rows of results.jsonl; independent of training.

Imported as ``mclclip.eval``. ``protocols`` has one module per protocol. ``images``, ``captions``
and ``items`` read data sets; ``features`` extracts features and ranks by them; ``metrics`` has
formulas in pure numpy; ``outcomes`` stores the result of every item and compares encoders by them;
``results`` reads and writes the rows. The verb is ``mclclip/verbs/eval.py``.
"""
