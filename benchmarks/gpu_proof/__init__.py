"""`make test-gpu`: what Brigade does on this host's GPUs, in 20 minutes, as one JSON and one page (docs/gpu.md)."""
