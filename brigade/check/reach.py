"""Whether hosts find and reach each other."""
