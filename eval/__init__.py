"""Evaluation of an encoder on data sets, as rows of results.jsonl; independent of training.

Imported as ``mclclip.eval``. One module per protocol (mmvp, retrieval, zeroshot, linear_probe,
knn, attributes, compositional); ``datasets`` and ``compositional_sets`` have the loaders,
``metrics`` the formulas in pure numpy, ``ranking`` ranks of queries, ``features`` the extraction of
features, ``results`` the rows, ``run`` the suites.
"""
