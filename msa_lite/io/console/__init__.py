"""What a user sees while work goes on, and the libraries underneath that would talk in between."""
