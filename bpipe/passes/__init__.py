"""Pure functions from a schedule to a schedule, or to what one rank has to do."""
