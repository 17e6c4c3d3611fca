"""All that a run needs. It imports nothing of the rooms around it but brigade/errors."""
