"""From a recipe to scores and a report: lists of stages, and the verbs that are loops over them.

This is the only part that knows both what a recipe is and what the stages are. Every stage skips itself when its folder
was made from the same inputs, so running a recipe again does only what is missing or has changed.
"""
