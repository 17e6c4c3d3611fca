"""What divides a model's computation, not only its states, over ranks. Only runs that ask for it import anything of it."""
