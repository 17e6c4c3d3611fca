"""Checkpoints: save them whole, choose one to continue from, read it on any number of ranks, and export the model."""
