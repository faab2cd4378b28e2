"""GGUF files: reads them, rebuilds their tokenizers, converts them into model folders."""
