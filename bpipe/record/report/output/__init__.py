"""Print a report as a table, JSON, a page or a trace."""
