"""Which strategies fit a model and a cluster, and which is fastest."""
