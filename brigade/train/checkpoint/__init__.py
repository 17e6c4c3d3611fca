"""What a run saved: reading it back without the ranks that wrote it, and handing it on."""
