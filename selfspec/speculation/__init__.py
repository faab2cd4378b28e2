"""Plans, draft trees, exits and their scoring."""
