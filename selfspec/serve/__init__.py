"""An OpenAI-compatible HTTP server over one engine: `selfspec serve`, `python -m selfspec.serve`."""
