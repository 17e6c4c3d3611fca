"""train.py without choices of Brigade that no flag switches off, for the ablation of benchmarks/peers.py.

python -m benchmarks.peers_without blocks -- --recipe ... --output_dir ...
"""

import sys
from typing import Any


def without_blocks() -> None:
    """Attention of each sample by torch's own CPU kernel."""
    from brigade.train.model import cpu_attention

    cpu_attention.LONGEST = 0


def without_kept_logits() -> None:
    """Logits at every position, supervised or not."""
    from brigade.train.data.collate import Collate

    flat = Collate._flat

    def whole(self: Collate, sequences: Any) -> dict[str, Any]:
        return {k: v for k, v in flat(self, sequences).items() if k not in ("logits_to_keep", "shift_labels")}

    Collate._flat = whole  # type: ignore[method-assign]


CHOICES = {"blocks": without_blocks, "kept_logits": without_kept_logits}


if __name__ == "__main__":
    end = sys.argv.index("--")
    for choice in sys.argv[1:end]:
        CHOICES[choice]()
    sys.argv[1:] = sys.argv[end + 1 :]
    import train
    from brigade.train.distributed import ranks

    ranks.run_to_the_end(train.main)
