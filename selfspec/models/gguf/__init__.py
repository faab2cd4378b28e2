"""GGUF files: read, converted, their tokenizers."""
