"""The decoder, its config, and loading of its weights."""
