"""The verbs on a recipe or a run: init, run and its parts, plan and dry run, ask."""
