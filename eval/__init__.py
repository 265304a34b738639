"""Evaluation: takes an encoder and a data set folder, gives rows; knows nothing of training.

Imported as ``mclclip.eval``. One module per protocol (mmvp, retrieval, zeroshot, linear_probe,
knn), ``datasets`` with the loaders, ``metrics`` in pure numpy, ``ranking``, ``features`` extracted
once per benchmark, ``results`` for the rows, ``run`` for suites.
"""
