"""Training: the engines, the trainer, and what watches them."""
