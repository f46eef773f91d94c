"""Write a run's page and its report.json from one list of sections."""
