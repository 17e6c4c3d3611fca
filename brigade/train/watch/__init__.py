"""What looks at a run while it trains: heartbeats, slow ranks, throughput, memory, profiles, a wish to stop."""
