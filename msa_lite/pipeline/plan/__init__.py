"""Look ahead: predict memory, disk and time of a recipe, and tell what a command would do."""
