"""What this host has: files and caches, object storage, limits, threads."""
