"""Resolve a recipe: models, prompt, rows and questions, found, loaded and checked before the first write."""
