"""A row of a part of `make test-gpu` that holds."""

ROW = {"what": "zero3, 2 GPUs", "figures": {"difference": 1e-6, "tokens_per_second": 9000.0}, "fell_short": "",
       "left_out": "", "command": "a"}  # fmt: skip
