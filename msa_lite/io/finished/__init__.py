"""Tell when a folder is complete, and what it was made of: seals, manifests, locks."""
