"""What a training step costs: memory, time, network."""
