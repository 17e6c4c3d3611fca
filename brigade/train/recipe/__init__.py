"""A recipe: its keys, how a command line changes them, the batch that follows from them, and the files that it names."""
