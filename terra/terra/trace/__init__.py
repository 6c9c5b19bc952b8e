"""Where operations are issued, and in which order."""
