"""Evaluation of an encoder on data sets, as rows of results.jsonl; independent of training.

Imported as ``mclclip.eval``. ``protocols`` has one module per protocol. ``images``, ``captions``,
``labelled_images``, ``items`` and ``minimal_pairs`` read data sets; ``features`` extracts features;
``metrics`` has formulas in pure numpy; ``outcomes`` holds how every item came out, ``results`` the
rows, and ``paired`` compares encoders; ``run`` is the verb.
"""
