"""What a training step costs: memory and time."""
