"""The methods that MSA is compared with: losses, the table of methods, and what a fit needs to minimise them."""
