"""A dress rehearsal: three steps over all hosts."""
