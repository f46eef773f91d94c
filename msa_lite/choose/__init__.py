"""The choice among candidates on validation rows: rules, scores, grids and searches, and the tables of a sweep."""
