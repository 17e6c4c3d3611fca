"""What computes along the axes besides data parallelism. Nothing here is loaded by a run that does not use them."""
