"""`python -m brigade export`: a trained model for other programs: as a Hugging Face directory, as a GGUF file, on the Hub."""
