"""The methods that MSA is compared with: losses, the table of methods, and their objectives for a fit."""
