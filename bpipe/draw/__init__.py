"""Pictures of schedules and simulations, and their writers."""
