"""Brigade: recipes for fine-tuning language models on many processes."""

import logging

# On a CPU with AVX512-BF16, bitsandbytes warns whoever imports it that it lacks a kernel for a product without a
# backward pass, which nobody here uses (upstream: fix_loaded). Set here, because a rehearsal imports a Trainer early.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
