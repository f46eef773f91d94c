"""The verbs on a recipe or a run: each is a loop over a list of stages (run, sweep, plan, dry run, attack)."""
