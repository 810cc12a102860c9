"""Imports the modules of every worker of a study, in the process that all of them are forked from.

Meanwhile nothing is collected: each of many collections would look through all that has been
imported, and take a quarter of the time. Nothing is frozen: libraries would report leaks at the
end.
"""

import gc
import importlib

MODULES = (
    *("torch._dynamo", "torch.nn.parallel", "torch.distributed.elastic.multiprocessing.api"),
    *("transformers.models.llama.modeling_llama", "transformers.optimization"),
    *("transformers.models.auto.tokenization_auto", "transformers.convert_slow_tokenizer"),
    *("rankscope.session.start", "rankscope.lab.study.worker"),
)

gc.disable()
try:
    for module in MODULES:
        importlib.import_module(module)
finally:
    gc.enable()
