"""Evaluation of an encoder on data sets, as rows of results.jsonl; independent of training.

Imported as ``mclclip.eval``. ``protocols`` has one module per protocol. ``images``, ``captions``
and ``items`` read data sets; ``features`` extracts features and ranks by them; ``metrics`` has
formulas in pure numpy; ``outcomes`` holds how every item came out and compares encoders by it,
``results`` the rows; ``run`` is the verb.
"""
