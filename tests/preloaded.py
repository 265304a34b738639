"""What processes of tests are forked with (`forks.context`): imported without looking for
garbage, and left out of the collections of every one of them."""

import gc
from importlib import import_module

gc.disable()
for _name in (
    "mclclip.cli.entry", "mclclip.config", "mclclip.method", "mclclip.ranks.process_group",
    "mclclip.run.lock", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch._dynamo",  # what the first optimizer imports
    "sklearn.metrics", "tests.contracts.test_evaluators", "tests.contracts.test_objectives",
    "tests.distributed.test_engines", "tests.e2e.conftest", "tests.made_before",
):  # fmt: skip
    import_module(_name)
gc.freeze()
gc.enable()
