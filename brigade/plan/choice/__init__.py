"""Choose among strategies: which ones fit a model and a cluster, and which of them is the fastest."""
